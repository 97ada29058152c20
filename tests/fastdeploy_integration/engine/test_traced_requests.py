"""Which requests a trace has that is recorded inside FastDeploy: each once, whatever happened to it on its way."""

import json
import random
import time

import pytest

from fastdeploy_kvcache_v1.fastdeploy_integration.engine.traced_requests import TracedRequests
from fastdeploy_kvcache_v1.telemetry.trace_recorder import TraceRecorder

from .by_hand import Server


@pytest.fixture
def recorded(tmp_path):
    """Makes a server that records its requests. `server.lines()` closes the trace and returns it."""
    made = []

    def make(*sizes, **settings):
        server, recorder = Server(*sizes, **settings), TraceRecorder(tmp_path / "trace.jsonl", 4)
        server.cache.traced = TracedRequests(recorder)
        made.append(recorder)

        def lines():
            recorder.close()
            assert recorder.num_lost == 0
            return [json.loads(line) for line in recorder.path.read_text().splitlines()]

        server.lines = lines
        return server

    yield make
    for recorder in made:
        recorder.close()


def lengths(server):
    return [(line["input_length"], line["output_length"]) for line in server.lines()]


def test_preempted_and_lost_requests_stand_once_in_the_order_of_their_first_batch(recorded):
    rng, server = random.Random(1), recorded(14, 8, write_policy="write_back")
    tasks = [
        server.add(f"r{number}", [number % 3] * rng.randint(1, 20), max_tokens=rng.randint(1, 12))
        for number in range(60)
    ]
    for number in range(2000):
        server.step(*["lost in put"] * (number % 7 == 6))
        if not server.clients.requests:
            break
    assert server.counters.requests_preempted > 10
    assert lengths(server) == [(len(task.prompt_token_ids), len(task.output_token_ids)) for task in tasks]


def test_a_request_that_is_aborted_while_it_is_preempted_ends_with_the_abortion(recorded):
    server = recorded(40)
    task = server.add("a", [1] * 10, 50)
    server.step()
    server.manager.trigger_abort(task, batch := [])
    assert server.cache.traced._recorder.num_lines == 0, "FastDeploy says the same of preempted ones"
    server.cache.send_swaps(batch)
    assert lengths(server) == [(10, 1)]


def test_a_reset_ends_what_is_under_way(recorded):
    server = recorded(40)
    for name in "ab":
        server.add(name, [1] * 10, 50)
    server.step()
    server.cache.reset()
    assert len(server.lines()) == 2


def test_sessions_are_those_of_the_fields_and_times_those_of_the_metrics(recorded):
    server, now = recorded(40), time.time()
    for fields, arrived in (
        ({"user": "ada", "return_in_s": 2.5}, now + 900),
        ({"prompt_cache_key": "ada", "user": "eve"}, None),
        ({"session_id": "eve", "user": "ada"}, now),
        ({}, now),
    ):
        task = server.add("r", [1] * 10)
        vars(task).update(fields)
        task.metrics.arrival_time = arrived
        server.run_dry()
    lines = server.lines()
    names = [line.get("session_id") for line in lines]
    assert names[0] == names[1] is not None
    assert names[2] not in (names[0], None)
    assert names[3] is None
    assert ["delay" in line for line in lines] == [False, True, False, False]
    assert [line.get("return_in_s") for line in lines] == [2.5, None, None, None]
    assert all(line["timestamp"] < 600_000 for line in lines), "a clock that was set back makes no future"
