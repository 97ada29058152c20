"""FastDeploy's real server with two worker processes: the tokens of one, from both tiers, whatever one of them does."""

import json
import re
from contextlib import suppress

import httpx
import pytest
from openai import OpenAIError

from .cpu_server import FLAGS, CpuServer, started, wait_until
from .fastdeploy_trees import RELEASES
from .server_workload import NUM_DOCUMENTS, Workload, document

pytestmark = [pytest.mark.process, pytest.mark.fastdeploy, pytest.mark.timeout(900)]

TWO = ("--tensor-parallel-size", "2")
TIERS = ("--num-gpu-blocks-override", "16", "--write-policy", "write_through", "--swap-space", "0.02")


@pytest.fixture(scope="module")
def expected(release, tmp_path_factory):
    """One rank of FastDeploy as it is without us, prefix cache off."""
    flags = ("--no-enable-prefix-caching", "--num-gpu-blocks-override", "256")
    with started(release, tmp_path_factory.mktemp("one"), *flags, manager=False) as server, server.client() as client:
        workload = Workload(server, client)
        workload.documents(rounds=1)
        assert server.stop() == 0, server.stderr
    return {f"document {index}": workload.answers[f"document {index} round 0"].tokens for index in range(NUM_DOCUMENTS)}


def copied(server):
    """Blocks out, blocks in and failures, by rank."""
    totals = [json.loads((server.logs / f"cpu_worker{rank}.json").read_text()) for rank in ("", "1")]
    return [(each["swap_out"]["blocks"], each["swap_in"]["blocks"], each["swap_in"]["failures"]) for each in totals]


def assert_tokens(workload, expected):
    assert len(workload.tokens()) == 3 * NUM_DOCUMENTS
    for name, tokens in workload.tokens().items():
        assert tokens == expected[name.split(" round")[0]], name


def test_two_ranks_with_both_tiers_give_the_tokens_of_one(release, expected, tmp_path):
    with started(release, tmp_path, *TIERS, *TWO) as server, server.client() as client:
        assert len(server.workers()) == 2
        workload = Workload(server, client)
        workload.documents()
        assert_tokens(workload, expected)
        assert all(workload.answers[f"document {index} round 2"].cached_tokens > 0 for index in range(NUM_DOCUMENTS))
        first, second = copied(server)
        assert first == second
        assert min(first[:2]) > 0
        wait_until(
            lambda: server.metrics()["swap_blocks_total"] == 2 * sum(first[:2]),
            "both ranks' copies in the metrics",
        )
        assert server.metrics()["swap_in_blocks_total"] == first[1], "decided once, for all ranks"
        logs = "".join(path.read_text() for path in server.logs.rglob("*") if path.is_file() and path.suffix != ".json")
        assert "on each of 2 tensor-parallel ranks" in logs
        assert server.stop() == 0, server.stderr


@pytest.mark.parametrize("rank", [0, 1])
def test_copies_that_fail_on_one_rank_change_no_token(release, expected, tmp_path, rank):
    faults = f'{{"ranks": [{rank}], "seed": 3, "max_delay_ms": 2, "fail": {{"input": [1, 30, 77], "output": [5]}}}}'
    environment = {"FASTDEPLOY_KVCACHE_COPY_FAULTS": faults}
    with started(release, tmp_path, *TIERS, *TWO, environment=environment) as server, server.client() as client:
        workload = Workload(server, client)
        workload.documents()
        assert_tokens(workload, expected)
        failures = [each[2] for each in copied(server)]
        assert failures[rank] > 0
        assert failures[1 - rank] == 0
        assert server.ask(client, document(0)).tokens == expected["document 0"]
        assert server.stop() == 0, server.stderr


def test_a_rank_that_ends_ends_the_server_and_is_named(release, tmp_path):
    """Under an open stream, which does not hang and does not come to a good end."""
    rank = RELEASES.index(release) % 2  # each release another one
    server = CpuServer(release, tmp_path, *FLAGS, *TIERS, *TWO)
    try:
        server.wait_ready()
        known = server.processes()
        with server.client() as client:
            options = {"stream": True, "max_tokens": 450, "extra_body": {"min_tokens": 450}}
            stream = client.chat.completions.create(model="tiny", messages=document(0), **options)
            chunks = [next(stream), next(stream)]
            server.workers()[rank].kill()
            with suppress(OpenAIError, httpx.HTTPError):
                chunks.extend(stream)
        assert not any(choice.finish_reason for chunk in chunks for choice in chunk.choices)
        assert server.process.wait(120) == 1
        assert re.search(rf"worker rank {rank} of 2 ended \(status -9\)", server.stderr)
        server.assert_nothing_left(known)
    finally:
        server.kill()
