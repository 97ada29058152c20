"""Real servers over the stand-in of the vendor's SDK: what one computed, the other one does not compute again."""

import json

import httpx
import pytest

from tests.e2e.server_process import OPERATOR, ServerProcess, started, wait_until
from tests.e2e.test_storage import CACHED, PROMPT, ask, wait_stored
from tests.storage.attention_store.stand_in import environment, num_stored, set_faults

pytestmark = pytest.mark.process

WORTH_IT = 16
"""Blocks: a shorter stored prefix is computed instead."""

SIZE = ("--block-size", "16", "--num-gpu-blocks-override", "120", "--max-model-len", "900", "--swap-space", "0")
FLAGS = (*SIZE, "--kvcache-storage-backend", "attention_store", "--storage-prefetch", "wait_complete")


def serve(path, store, *flags, **variables):
    return started(path, *FLAGS, *flags, environment={**environment(store), **variables})


def end(server):
    wait_until(lambda: server.metrics()["quarantined_blocks"] == 0, "the end of failed calls", 90.0)
    report = server.wait_idle()
    assert report["ok"], report
    assert server.stop() == 0, server.stderr
    server.assert_nothing_left()


@pytest.fixture
def store(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def answered(tmp_path, store):
    """Tokens of the answer to `PROMPT`, whose blocks are stored."""
    with serve(tmp_path / "first", store) as server:
        tokens, cached = ask(server)
        assert cached == 0
        wait_stored(server)
        end(server)
    return tokens


def fresh(server):
    """The device tier is empty, and the store is asked again."""
    httpx.post(f"{server.url}/reset_prefix_cache", headers=OPERATOR, timeout=30.0).raise_for_status()
    wait_until(lambda: server.metrics()["storage_is_left_alone"] == 0, "a store that is asked")


def test_faults_cost_hits_and_no_token(tmp_path, store, answered):
    """The last ones leave blocks in quarantine, while bytes go on arriving in them."""
    with serve(tmp_path / "second", store) as server:
        for faults, cached in (
            ({"read": {"delay_s": 0.3}}, CACHED),
            ({"read": {"short": 5, "times": 1}}, 5 * 16),
            ({"match": {"error": "no route to host", "times": 1}}, 0),
            ({"match": {"answer": -1, "times": 1}}, 0),
            ({"write": {"short": 3}}, CACHED),
            ({"write": {"error": "no space", "times": 1}}, CACHED),
            ({"read": {"error": "timed out", "late_s": 4.0, "times": 1}}, 0),
        ):
            fresh(server)
            if "match" in faults:  # a write asks, too, and would meet the fault in place of the request
                wait_until(lambda: server.check()["storage_idle"], "the end of what is stored")
            set_faults(store, **faults)
            assert ask(server) == (answered, cached), faults
        assert server.metrics()["quarantined_blocks"] > 0
        for _ in range(4):
            set_faults(store)
            fresh(server)
            assert ask(server)[0] == answered
        end(server)


def test_a_store_that_hangs_hangs_no_request_and_not_the_end_of_the_server(tmp_path, store, answered):
    with serve(tmp_path / "second", store) as server:
        set_faults(store, read={"hang": True})
        assert ask(server) == (answered, 0)
        assert server.stop() == 0
        server.assert_nothing_left()


def refused(path, environment, *flags):
    """The one line that a server says which does not start."""
    server = ServerProcess(path, *FLAGS, *flags, environment=environment)
    try:
        assert server.wait_exit() == 2
        (line,) = server.stderr.strip().splitlines()
        return line
    finally:
        server.kill()


def test_a_store_that_cannot_be_used_is_one_line_at_the_start(tmp_path, store):
    set_faults(store, match={"error": "licence expired"})
    line = refused(tmp_path / "server", environment(store))
    assert "the attention store cannot be used: licence expired" in line


def index_of(store):
    """Paths of blocks that the index has, replayed."""
    paths = set()
    for line in (store / "index.jsonl").read_text().splitlines():
        _, tokens, first, before, now = json.loads(line)
        assert (before is None) != (now is None)
        blocks = {tuple(tokens[: end + 16]) for end in range(16 * first, len(tokens), 16)}
        paths = paths | blocks if now is not None else paths - blocks
    return paths


def test_flush_only_moves_no_data_and_says_what_the_server_has(tmp_path, store):
    with serve(tmp_path / "first", store, FD_AS_ONLY_FLUSH="1") as server:
        ask(server)
        wait_until(lambda: server.metrics()["storage_flushes_total"] >= 1, "a flush")
        assert index_of(store) == {tuple(PROMPT[:end]) for end in range(16, CACHED + 1, 16)}
        for seed in range(1, 5):
            ask(server, [1 + (7 * seed + number * seed) % 250 for number in range(600)])
        wait_until(lambda: tuple(PROMPT[:CACHED]) not in index_of(store), "what was evicted to leave the index")
        assert num_stored(store) == 0
        assert server.metrics()["storage_blocks_total{direction=store}"] == 0
        end(server)
