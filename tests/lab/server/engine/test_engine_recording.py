"""Which requests a recorded trace has: those that computed something, each once, in the order of arrival."""

import json
import random

import pytest

from fastdeploy_kvcache_v1.lab.server.engine.generation import Failure
from fastdeploy_kvcache_v1.telemetry.trace_recorder import TraceRecorder
from tests.lab.server.harness import Harness, random_requests, small


@pytest.fixture
def recorded(tmp_path):
    """A harness whose core records, and what was written."""
    path = tmp_path / "trace.jsonl"
    recorder = TraceRecorder(path, block_size=4)

    def make(max_num_seqs):
        harness = Harness(small(), max_num_seqs=max_num_seqs, max_num_batched_tokens=16)
        harness.core.recorder = recorder
        return harness

    def lines():
        recorder.close()
        assert recorder.num_lost == 0
        found = [json.loads(line) for line in path.read_text().splitlines()]
        return [(line["input_length"], line["output_length"]) for line in found]

    yield make, lines
    recorder.close()


def test_preempted_requests_stand_once_and_in_the_order_of_arrival(recorded):
    make, lines = recorded
    harness = make(6)
    requests = random_requests(3, 60)
    rng, waiting = random.Random(1), list(requests)
    while waiting or not harness.core.is_idle:
        for _ in range(rng.randrange(3)):
            if waiting:
                harness.submit(*waiting.pop(0))
        harness.step()
    assert harness.num_preemptions > 0
    assert lines() == [(len(prompt), output) for _, prompt, output in requests]


def test_trace_has_aborted_running_requests_but_no_aborted_waiting_ones(recorded):
    make, lines = recorded
    harness = make(1)
    running = harness.submit("running", [1, 2, 3, 4, 5], 20)
    harness.submit("waiting", [9, 8, 7], 4)
    harness.submit("after", [6, 6], 2)
    for _ in range(4):
        harness.step()
    harness.core.abort("waiting")
    harness.core.abort("running")
    harness.run()
    assert lines() == [(5, len(running.tokens)), (2, 2)]
    assert 0 < len(running.tokens) < 20


def test_the_end_of_the_server_loses_no_line(recorded):
    make, lines = recorded
    harness = make(4)
    for name in "ab":
        harness.submit(name, [1, 2, 3, 4, 5], 20)
    for _ in range(3):
        harness.step()
    harness.core.close(Failure(503, "the server is shutting down"))
    harness.submit("late", [1], 1)
    assert [length for length, _ in lines()] == [5, 5]
