"""Prefill and decode on different servers: the tokens of a mixed one, and nothing left behind."""

import json
from contextlib import contextmanager

import pytest

from tests.e2e.peer_servers import cluster
from tests.e2e.server_process import started
from tests.e2e.workload import run_workload

ROOMY = ("--block-size", "8", "--max-num-seqs", "12", "--max-num-batched-tokens", "256")
pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    with started(tmp_path_factory.mktemp("mixed"), *ROOMY) as server, server.client() as client:
        return run_workload(client)


@contextmanager
def answering(expected, directory, *flags, hints=False, **options):
    """A cluster that has answered so, and has nothing left in the end."""
    with cluster(directory, *ROOMY, *flags, **options) as servers:
        with servers.router.client() as client:
            assert run_workload(client, hints=hints) == expected
        yield servers
        servers.assert_idle()
        servers.stop()


@pytest.mark.smoke
def test_tokens_are_those_of_a_mixed_server(tmp_path, expected):
    """Conversations, streamed and not, twelve at a time."""
    with answering(expected, tmp_path):
        pass


def test_hints_change_no_token_and_reach_the_prefill_server(tmp_path, expected):
    trace = tmp_path / "trace.jsonl"
    with answering(expected, tmp_path / "servers", hints=True, role_flags={"prefill": ("--record-trace", str(trace))}):
        pass
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    for name in ("session_id", "return_in_s"):
        assert 0 < sum(name in line for line in lines) < len(lines)


@pytest.mark.parametrize(("num_prefill_ranks", "num_decode_ranks"), [(2, 1), (2, 4)])
def test_servers_with_different_rank_counts_read_only_their_heads(
    tmp_path, expected, num_prefill_ranks, num_decode_ranks
):
    sizes = {"prefill": num_prefill_ranks, "decode": num_decode_ranks}
    role_flags = {role: ("--tensor-parallel-size", str(size)) for role, size in sizes.items()}
    with answering(expected, tmp_path, role_flags=role_flags) as servers:
        assert servers.total("decode", "prompts_recomputed_total") == 0
        assert servers.total("decode", "transfers_ended_total{outcome=arrived,side=decode}") > 10


def test_what_both_servers_store_is_found_after_a_restart(tmp_path, expected):
    store = ("--kvcache-storage-backend", "file", "--kvcache-storage-dir", str(tmp_path / "store"))
    flags = (*store, "--swap-space", "0.2", "--storage-prefetch", "wait_complete")
    with answering(expected, tmp_path / "first", *flags):
        pass
    with answering(expected, tmp_path / "second", *flags) as servers:
        loaded = "storage_blocks_total{direction=load}"
        assert servers.total("decode", loaded) > 10
        assert servers.total("prefill", loaded) > 0


def test_failed_copies_on_one_prefill_rank_change_no_token(tmp_path, expected):
    """While every rank of the decode server reads from it."""
    faults = {"ranks": [1], "seed": 3, "max_delay_ms": 3, "fail": {"swap_in": [2, 9, 30], "swap_out": [4]}}
    short = ("--swap-space", "0.02", "--num-gpu-blocks-override", "120", "--write-policy", "write_through")
    role_flags = dict.fromkeys(("prefill", "decode"), (*short, "--tensor-parallel-size", "2"))
    environment = {"FASTDEPLOY_KVCACHE_COPY_FAULTS": json.dumps(faults)}
    with answering(expected, tmp_path, role_flags=role_flags, environment=environment) as servers:
        failures = [f"transfer_failures_total{{direction={direction},rank=1}}" for direction in ("in", "out")]
        assert sum(servers.total("prefill", name) for name in failures) > 0
        assert servers.total("decode", "transfers_ended_total{outcome=arrived,side=decode}") > 0
