"""Without FastDeploy these tests are skipped; the last lines of a run say how to run them."""

import pytest

from .fastdeploy_trees import RELEASES, tree
from .server_workload import expected_of


@pytest.fixture(scope="module", params=RELEASES)
def release(request):
    tree(request.param)  # or skip
    return request.param


@pytest.fixture(scope="module")
def expected(release):
    return expected_of(release)


@pytest.fixture
def client(server):
    """Of the `server` that the module's own fixture starts."""
    with server.client() as openai_client:
        yield openai_client
