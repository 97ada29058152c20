"""Which requests a trace has that is recorded inside FastDeploy: each once, whatever happened to it on its way."""

import json
import random
import time

import pytest

from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.traced_requests import TracedRequests
from fastdeploy_kvcache_v1.replay.driver import Replay, ReplayOptions
from fastdeploy_kvcache_v1.replay.trace import read_trace
from fastdeploy_kvcache_v1.trace_recorder import TraceRecorder

from .fake_scheduler import Control, FakeScheduler, FakeTask, Kind, Status, make_adapter, serve


class Recorded:
    def __init__(self, path, num_device_blocks, num_host_blocks=0, **settings):
        self.path = path
        self.recorder = TraceRecorder(path, 4)
        self.cache = make_adapter(num_device_blocks, num_host_blocks, **settings)
        self.cache.traced = TracedRequests(self.recorder)

    def lines(self):
        self.recorder.close()
        assert self.recorder.num_lost == 0
        return [json.loads(line) for line in self.path.read_text().splitlines()]


@pytest.fixture
def recorded(tmp_path):
    made = []

    def make(*sizes, **settings):
        made.append(Recorded(tmp_path / "trace.jsonl", *sizes, **settings))
        return made[-1]

    yield make
    for each in made:
        each.recorder.close()


def test_preempted_and_rolled_back_requests_stand_once_in_the_order_of_their_first_batch(recorded):
    rng = random.Random(1)
    trace = recorded(14, 8, write_policy="write_back")
    scheduler = FakeScheduler(trace.cache, chance=lambda: rng.random() < 0.2)
    tasks = [
        FakeTask(f"r{number}", [number % 3] * rng.randint(1, 20), max_tokens=rng.randint(1, 12)) for number in range(60)
    ]
    for task in tasks:
        scheduler.add(task)
    scheduler.run_dry()
    assert trace.cache.manager.stats().counters.requests_preempted > 10
    found = [(line["input_length"], line["output_length"]) for line in trace.lines()]
    assert found == [(len(task.prompt_token_ids), len(task.output_token_ids)) for task in tasks]


def test_a_replay_hits_what_the_adapter_hit(recorded):
    trace = recorded(300)
    rng = random.Random(2)
    talks = {}
    prompts = []
    for _ in range(40):
        user = rng.randrange(3)
        talks[user] = [*talks.get(user, [7] * 9), *(rng.randrange(9) for _ in range(rng.randint(1, 9)))]
        prompts.append(talks[user] if len(talks[user]) < 60 else talks.pop(user))
    cached = serve(FakeScheduler(trace.cache), *prompts)
    assert len(trace.lines()) == 40
    config = KVCacheConfig(300, 0, 4, max_queued_events=0)
    replay = Replay(ReplayOptions(config, window=1, admissions_per_step=1, outputs=True))
    replay.run(read_trace(trace.path))
    assert replay.num_device_hit_tokens == sum(cached) > 300


def test_aborted_requests_stand_with_what_they_had_and_waiting_ones_do_not(recorded):
    trace = recorded(40)
    scheduler = FakeScheduler(trace.cache, seats=1)
    aborted, waiting = FakeTask("a", [1] * 10, max_tokens=50), FakeTask("b", [2] * 10)
    scheduler.add(aborted)
    scheduler.add(waiting)
    for _ in range(5):
        scheduler.step()
    scheduler.waiting.remove(waiting)
    scheduler.aborting.add("a")
    scheduler.run_dry()
    (line,) = trace.lines()
    assert (line["input_length"], line["output_length"]) == (10, len(aborted.output_token_ids))
    assert line["output_length"] > 0


def test_a_request_that_is_aborted_while_it_is_preempted_ends_with_the_abortion(recorded):
    trace = recorded(40)
    scheduler = FakeScheduler(trace.cache)
    task = FakeTask("a", [1] * 10, max_tokens=50)
    scheduler.add(task)
    scheduler.step()
    scheduler.running.remove(task)
    task.status = Status.PREEMPTED
    scheduler._free(task)
    assert trace.recorder.num_lines == 0
    trace.cache.send_swaps([Control(Kind.ABORT, task)])
    assert [line["input_length"] for line in trace.lines()] == [10]


def test_a_reset_ends_what_is_under_way(recorded):
    trace = recorded(40)
    scheduler = FakeScheduler(trace.cache)
    for name in "ab":
        scheduler.add(FakeTask(name, [1] * 10, max_tokens=50))
    scheduler.step()
    trace.cache.reset()
    assert len(trace.lines()) == 2


def test_users_are_in_the_ids_and_times_in_the_metrics(recorded):
    trace = recorded(40)
    scheduler = FakeScheduler(trace.cache)
    now, number = time.time(), "0b5d4f5e-54ff-4ee4-a8d2-2d6b5d2a1c3f"
    for request_id, arrived in (
        (f"chatcmpl-ada-{number}_0", now + 900),
        (f"cmpl-ada-{number}", None),
        (f"cmpl-eve-of-{number}-{number}_12", now),
        (f"chatcmpl-{number}_0", now),
        ("chatcmpl-ada", now),
    ):
        task = FakeTask(request_id, [1] * 10)
        task.metrics.arrival_time = arrived
        scheduler.add(task)
        scheduler.run_dry()
    lines = trace.lines()
    names = [line.get("session_id") for line in lines]
    assert names[0] == names[1] is not None
    assert names[2] not in (names[0], None)
    assert names[3:] == [None, None]
    assert ["delay" in line for line in lines] == [False, True, False, False, False]
    assert all(line["timestamp"] < 600_000 for line in lines), "a clock that was set back makes no future"
