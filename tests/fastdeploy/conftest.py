"""Without FastDeploy these tests are skipped; one line of the summary says how to run them."""

import os

import pytest

from .fastdeploy_trees import COMMAND, RELEASES, VARIABLES, tree


@pytest.fixture(scope="module", params=RELEASES)
def release(request):
    tree(request.param)  # or skip
    return request.param


@pytest.fixture
def client(server):
    """Of the `server` that the module's own fixture starts."""
    with server.client() as openai_client:
        yield openai_client


def pytest_terminal_summary(terminalreporter):
    missing = [f"FastDeploy {release}" for release, variable in VARIABLES.items() if not os.environ.get(variable)]
    if missing:
        terminalreporter.write_line(f"tests with {' and '.join(missing)} were skipped; to run them: {COMMAND}")
