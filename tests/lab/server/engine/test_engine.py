"""The engine thread: whoever talks to it may go away at any time, and it goes on."""

import asyncio
import threading

from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.lab.model.step import LayerComputed
from fastdeploy_kvcache_v1.lab.server.app import RequestStream
from fastdeploy_kvcache_v1.lab.server.engine.engine import Engine
from fastdeploy_kvcache_v1.lab.server.engine.engine_core import EngineCore
from fastdeploy_kvcache_v1.lab.server.engine.generation import Delta
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager
from tests.lab.server.harness import Harness, Worker, WorkerThread, small


def make_engine():
    """With what its owner was told."""
    cache = KVCacheConfig(16, block_size=4)
    manager = CacheManager(cache)
    worker = WorkerThread(Worker(cache))
    fatal = []
    return Engine(
        EngineCore(manager, worker.send, max_num_seqs=4, max_num_batched_tokens=16), worker, on_fatal=fatal.append
    ), fatal


def test_call_whose_caller_gave_up_is_skipped():
    engine, fatal = make_engine()
    engine.start()
    try:
        gate, ran = threading.Event(), []
        blocking = engine.call(lambda core: gate.wait(10))
        given_up = engine.call(lambda core: ran.append("given up"))
        assert given_up.cancel()
        gate.set()
        assert blocking.result(10)
        assert engine.call(lambda core: core.is_idle).result(10)
    finally:
        engine.close()
    assert ran == []
    assert fatal == []


def test_actions_that_arrive_during_a_turn_wait_until_after_its_step(monkeypatch):
    """A client that asks again as soon as it is answered would stop everybody's steps otherwise."""
    engine, fatal = make_engine()
    order, done = [], threading.Event()
    monkeypatch.setattr(engine.core, "step", lambda: order.append("step"))

    def ask(again):
        order.append("asked")
        if again:
            engine.call(lambda core: ask(again - 1))
        else:
            done.set()

    engine.call(lambda core: ask(3))
    engine.start()
    assert done.wait(10)
    engine.close()
    assert order[:8] == ["asked", "step"] * 4
    assert fatal == []


def test_output_after_the_end_of_the_event_loop_is_dropped():
    engine, _ = make_engine()

    async def open_stream():
        return RequestStream(engine, "r")

    stream = asyncio.run(open_stream())
    stream.sink(Delta("late", (1,)))


def test_worker_stands_still_while_its_step_takes_longer_than_patience():
    now = [1000.0]
    harness = Harness(small(), clock=lambda: now[0])
    engine = Engine(harness.core, WorkerThread(harness.worker), on_fatal=lambda reason: None, patience_s=10)
    assert engine.standstill is None, "nothing is computed, for however long"
    harness.submit("r", range(6), 1)
    harness.core.step()
    now[0] += 10
    assert engine.standstill is None
    now[0] += 1
    assert engine.standstill == "the worker has computed no layer for 11 s"
    engine._on_message(0, LayerComputed())
    engine._next_action()()
    assert engine.standstill is None, "a long step goes on"
    harness.work(harness.sent.pop())
    assert engine.standstill is None
    harness.run()
