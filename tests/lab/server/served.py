"""The HTTP face over a worker without a model, and what its answers hold."""

import json
import time
from contextlib import contextmanager

from fastapi.testclient import TestClient

from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.lab.server.app import create_app
from fastdeploy_kvcache_v1.lab.server.engine.engine import Engine
from fastdeploy_kvcache_v1.lab.server.engine.engine_core import EngineCore
from fastdeploy_kvcache_v1.lab.server.metrics import Metrics
from fastdeploy_kvcache_v1.lab.server.requests import RequestReader
from fastdeploy_kvcache_v1.lab.server.settings import ServerConfig
from fastdeploy_kvcache_v1.lab.server.text import load_tokenizer
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager
from tests.lab.server.harness import Worker, WorkerThread


class Server:
    def __init__(self, cache, options, **core_options):
        config = ServerConfig(cache=cache, served_model_name="tiny", max_model_len=200, **options)
        manager = CacheManager(cache)
        self.worker = WorkerThread(Worker(cache))
        self.fatal = []
        core = EngineCore(manager, self.worker.send, max_num_seqs=8, max_num_batched_tokens=64, **core_options)
        self.engine = Engine(core, self.worker, on_fatal=self.fatal.append)
        reader = RequestReader(config, load_tokenizer(None))
        self.client = TestClient(create_app(config, self.engine, reader, Metrics(core, reader.fields)))

    def chat(self, **body):
        messages = [{"role": "user", "content": "hello"}]
        return self.client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 8, **body})

    def complete(self, **body):
        return self.client.post("/v1/completions", json={"max_tokens": 8, **body})

    def wait_for(self, condition):
        """Until `condition(check report)`; fails after ten seconds."""
        for _ in range(1000):
            report = self.client.get("/debug/check").json()
            if condition(report):
                return
            time.sleep(0.01)
        raise AssertionError(report)

    def wait_fatal(self):
        """What the engine told its owner; answers to requests may come first."""
        for _ in range(1000):
            if self.fatal:
                break
            time.sleep(0.01)
        return self.fatal


@contextmanager
def running(cache=None, tool_call_ends=frozenset(), **options):
    server = Server(cache or KVCacheConfig(64, 16, block_size=4), options, tool_call_ends=tool_call_ends)
    server.engine.start()
    try:
        yield server
    finally:
        server.engine.close()


def error_of(response):
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    return error


def events_of(response):
    lines = [line for line in response.text.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    return [line.removeprefix("data: ") for line in lines]


def chunks_of(response):
    """The JSON of every event of a stream but its end."""
    *events, done = events_of(response)
    assert done == "[DONE]"
    return [json.loads(event) for event in events]
