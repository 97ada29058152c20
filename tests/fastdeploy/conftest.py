"""Without FastDeploy these tests are skipped; the last lines of a run say how to run them."""

import pytest

from .fastdeploy_trees import RELEASES, tree


@pytest.fixture(scope="module", params=RELEASES)
def release(request):
    tree(request.param)  # or skip
    return request.param


@pytest.fixture
def client(server):
    """Of the `server` that the module's own fixture starts."""
    with server.client() as openai_client:
        yield openai_client
