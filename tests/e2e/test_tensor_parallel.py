"""Real servers with two worker processes: the answers of one, from every tier, and one clear end."""

import httpx2
import pytest

from tests.e2e.server_process import started, wait_until

pytestmark = pytest.mark.process

SMALL = ("--block-size", "8", "--num-gpu-blocks-override", "40", "--max-model-len", "300", "--swap-space", "0.05")
TWO = ("--tensor-parallel-size", "2")
QUESTION = "what does a block cost when two ranks have it? " * 6


def answer(server, prompt=QUESTION):
    options = {"prompt": prompt, "max_tokens": 16, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    reply = httpx2.post(f"{server.url}/v1/completions", json=options, timeout=60).json()
    return reply["choices"][0]["completion_token_ids"], reply["usage"]["prompt_tokens_details"]["cached_tokens"]


def push_out(server):
    for number in range(4):
        answer(server, f"{number} something else altogether " * 7)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    with started(tmp_path_factory.mktemp("one") / "server", *SMALL, "--no-enable-prefix-caching") as server:
        return answer(server)[0]


def test_every_tier_of_two_ranks_gives_the_answer_of_one(tmp_path, expected):
    store = ("--kvcache-storage-backend", "file", "--kvcache-storage-dir", str(tmp_path / "store"))
    flags = (*SMALL, *store, "--storage-prefetch", "wait_complete")
    with started(tmp_path / "server", *flags, *TWO) as server:
        assert answer(server) == (expected, 0)
        tokens, on_device = answer(server)
        assert (tokens, on_device >= 256) == (expected, True)
        push_out(server)
        assert answer(server)[0] == expected
        wait_until(lambda: server.metrics()["storage_blocks_total{direction=store}"] >= 70, "stored parts of blocks")
        metrics = server.metrics()
        for name in ("swap_blocks_total", "swap_bytes_total"):
            assert metrics[f"{name}{{direction=out,rank=0}}"] == metrics[f"{name}{{direction=out,rank=1}}"] > 0
        assert server.wait_idle()["ok"]
        assert server.stop() == 0, server.stderr
        server.assert_nothing_left()
    with started(tmp_path / "again", *flags, *TWO) as server:
        tokens, stored = answer(server)
        assert (tokens, stored >= 256) == (expected, True), "what both ranks have stored is found"
    with started(tmp_path / "alone", *flags) as server:
        assert answer(server) == (expected, 0), "another number of ranks keeps other bytes"
