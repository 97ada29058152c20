"""Prefill and decode on different servers: the tokens of a mixed one, and nothing left behind."""

import pytest

from tests.e2e.peer_servers import cluster
from tests.e2e.server_process import started
from tests.e2e.workload import run_workload

ROOMY = ("--block-size", "8", "--max-num-seqs", "12", "--max-num-batched-tokens", "256")


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    with started(tmp_path_factory.mktemp("mixed"), *ROOMY) as server, server.client() as client:
        return run_workload(client)


def test_tokens_are_those_of_a_mixed_server(tmp_path, expected):
    """Conversations, streamed and not, twelve at a time."""
    with cluster(tmp_path, *ROOMY) as servers:
        with servers.router.client() as client:
            assert run_workload(client) == expected
        servers.assert_idle()
        servers.stop()
