"""Requests through the whole cache on a GPU: `EngineCore`, `Scheduler`, `CacheManager`, `StepRunner`, controller.

The device tier is too small, so blocks leave it and come back, and rows are preempted. No token may change by that.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial

import cupy
from decoder import HEAD_DIM, HEADS, LAYERS, VOCABULARY, Decoder
from worker_checks import CupyBackend

from fastdeploy_kvcache_v1.attention.gqa import GQACacheBackend
from fastdeploy_kvcache_v1.batch_request import BatchRequest
from fastdeploy_kvcache_v1.config import KVCacheConfig, WritePolicy
from fastdeploy_kvcache_v1.embedded.engine.engine_core import EngineCore
from fastdeploy_kvcache_v1.embedded.engine.generation import Delta, Failure, Generation, GenerationRequest
from fastdeploy_kvcache_v1.embedded.engine.scheduler import Scheduler
from fastdeploy_kvcache_v1.embedded.text.text_stream import TextStream
from fastdeploy_kvcache_v1.model.sampler import SamplingParams
from fastdeploy_kvcache_v1.model.step_runner import StepRunner
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager
from fastdeploy_kvcache_v1.scheduler.cache_stats import Counters
from fastdeploy_kvcache_v1.scheduler.cache_utils import BlockHasher
from fastdeploy_kvcache_v1.worker.cache_controller import CacheController
from fastdeploy_kvcache_v1.worker.runtime import CudaRuntime

BLOCK_SIZE, SEATS, BUDGET = 8, 4, 48
DOCUMENTS, DOCUMENT_TOKENS = 6, 40
REQUESTS, MOST_OUTPUTS = 32, 20
ARRIVAL = 3
"""Steps from one request to the next."""


class NoText:
    """Tokens are compared, not texts."""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def prompts() -> list[tuple[int, ...]]:
    """Of a few documents, each with something of its own behind it."""
    source = random.Random(3)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(source.randrange(VOCABULARY) for _ in range(count))

    documents = [tokens(DOCUMENT_TOKENS) for _ in range(DOCUMENTS)]
    return [source.choice(documents) + tokens(source.randint(1, 20)) for _ in range(REQUESTS)]


@dataclass
class Server:
    """One process's worth of engine and worker. `serve` may be called once."""

    config: KVCacheConfig
    answers: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        compute = cupy.cuda.Stream(non_blocking=True)
        runtime = CudaRuntime(compute_handle=int(compute.ptr))
        layout = GQACacheBackend(LAYERS, HEADS, HEAD_DIM, BLOCK_SIZE, "float32").layout
        self.controller = CacheController(CupyBackend(layout), runtime=runtime)
        tensors = self.controller.initialize_kv_cache(self.config.num_device_blocks, self.config.num_host_blocks)
        decoder = Decoder(compute, BLOCK_SIZE)
        caches = [tensor.array for tensor in tensors]
        self.runner = StepRunner(decoder.forward, self.controller, caches, block_size=BLOCK_SIZE)
        self.runtime, self.manager = runtime, CacheManager(self.config)
        self.batches: deque[BatchRequest] = deque()
        scheduler = Scheduler(self.manager, block_size=BLOCK_SIZE, max_num_seqs=SEATS, max_num_batched_tokens=BUDGET)
        # Time stands still: that copies look slow beside this decoder must not decide what is loaded.
        self.core = EngineCore(self.manager, scheduler, self.batches.append, clock=lambda: 0.0)

    def serve(self) -> Counters:
        line = deque(enumerate(prompts()))
        number = 0
        while line or not self.core.is_idle:
            if line and number % ARRIVAL == 0:
                self._submit(*line.popleft())
            self.core.step()
            while self.batches:
                self.core.on_step_result(self.runner.run(self.batches.popleft()))
            self.manager.check()
            self.controller.check()
            number += 1
            assert number < 100 * REQUESTS, "requests do not end"
        self.controller.drain(60)
        self.core.on_report(self.runner.take_report())
        self.manager.check_idle()
        self.controller.free()
        self.runtime.close()
        return self.manager.stats().counters

    def _submit(self, number: int, prompt: tuple[int, ...]) -> None:
        answer: list[int] = []
        self.answers.append(answer)
        hasher = BlockHasher(BLOCK_SIZE)
        hasher.extend(prompt)

        def take(event: Delta | Failure) -> None:
            assert isinstance(event, Delta), event
            answer.extend(event.token_ids)

        outputs = 1 + number * 7 % MOST_OUTPUTS
        request = GenerationRequest(f"request {number}", prompt, outputs, SamplingParams(temperature=0))
        self.core.submit(Generation(request, hasher, TextStream(NoText()), take))


@cache
def without_cache() -> list[list[int]]:
    """What every server must answer."""
    server = Server(KVCacheConfig(num_device_blocks=200, block_size=BLOCK_SIZE, enable_prefix_caching=False))
    counters = server.serve()
    assert counters.device_hit_tokens == counters.swap_in_blocks == counters.requests_preempted == 0
    assert len({tuple(answer) for answer in server.answers}) > REQUESTS // 2, "answers that say little"
    return server.answers


def tokens_are_those_without_a_cache(policy: WritePolicy) -> None:
    server = Server(KVCacheConfig(24, 40, BLOCK_SIZE, policy))
    counters = server.serve()
    for number, (found, expected) in enumerate(zip(server.answers, without_cache(), strict=True)):
        assert found == expected, f"request {number}: {found} instead of {expected}"
    for name in ("device_hit_tokens", "host_hit_tokens", "swap_out_blocks", "swap_in_blocks", "device_evicted_blocks"):
        assert getattr(counters, name) > 0, f"{name} is 0: the cache was not in use"
    assert counters.failed_transfer_blocks == 0


CHECKS: dict[str, Callable[[], None]] = {
    f"tokens_are_those_without_a_cache[{policy.value}]": partial(tokens_are_those_without_a_cache, policy)
    for policy in WritePolicy
}
