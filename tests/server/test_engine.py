"""The engine thread: whoever talks to it may go away at any time, and it goes on."""

import asyncio
import threading

from fastdeploy_kvcache_v1.cache_manager import CacheManager
from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.embedded.engine import Engine
from fastdeploy_kvcache_v1.embedded.engine_core import EngineCore
from fastdeploy_kvcache_v1.embedded.generation import Delta
from fastdeploy_kvcache_v1.embedded.scheduler import Scheduler
from fastdeploy_kvcache_v1.embedded.service import RequestStream
from tests.server.shadow import ShadowWorker, ShadowWorkerClient


def make_engine():
    """With what its owner was told."""
    cache = KVCacheConfig(16, block_size=4)
    manager = CacheManager(cache)
    worker = ShadowWorkerClient(ShadowWorker(cache))
    scheduler = Scheduler(manager, block_size=4, max_num_seqs=4, max_num_batched_tokens=16)
    fatal = []
    return Engine(EngineCore(manager, scheduler, worker.send), worker, on_fatal=fatal.append), fatal


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


def test_output_after_the_end_of_the_event_loop_is_dropped():
    engine, _ = make_engine()

    async def open_stream():
        return RequestStream(engine, "r")

    stream = asyncio.run(open_stream())
    stream.sink(Delta("late", (1,)))
