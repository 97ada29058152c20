"""Engine core and the worker's half, the real ones, in one process and step by step: the model is a checksum."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import paddle  # noqa: F401  # at its import it asks the system for its libraries, which no test may

from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.contract.messages import BatchRequest, CacheAccess, WorkerReport
from fastdeploy_kvcache_v1.lab.model.checksum import ChecksumModel
from fastdeploy_kvcache_v1.lab.model.config import ChecksumConfig
from fastdeploy_kvcache_v1.lab.model.ranks import ONE_RANK, Ranks
from fastdeploy_kvcache_v1.lab.model.sampler import SamplingParams
from fastdeploy_kvcache_v1.lab.model.step import Logits, SequenceSlice, StepResult
from fastdeploy_kvcache_v1.lab.model.step_runner import StepRunner
from fastdeploy_kvcache_v1.lab.server.engine.engine_core import EngineCore
from fastdeploy_kvcache_v1.lab.server.engine.generation import Delta, Failure, Generation, GenerationRequest
from fastdeploy_kvcache_v1.scheduler.block_hashing import BlockHasher
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager
from fastdeploy_kvcache_v1.storage.engine.tier import StorageTier
from fastdeploy_kvcache_v1.worker.cache_controller import CacheController
from fastdeploy_kvcache_v1.worker.runtime import Runtime
from tests.lab.server.random_text import byte_stream
from tests.world.streams import Clock, VirtualDevice

MODEL = ChecksumConfig(num_layers=1, num_kv_heads=1)


class Letters(ChecksumModel):
    """Says a letter, and always the same one, whatever sampling asks for."""

    def forward(self, *given: Any) -> list[Logits]:
        return [self._best_letter(rows) for rows in super().forward(*given)]

    def _best_letter(self, rows: Logits) -> Logits:
        best = rows[:, ord("a") : ord("z") + 1].argmax(axis=1) + ord("a")
        only = np.full_like(rows, -np.inf)
        only[np.arange(len(rows)), best] = 0
        return only


def expected_outputs(prompt: Sequence[int], count: int) -> list[int]:
    """What the model says that has all tokens in one block of its own."""
    return list(_expected(tuple(prompt), count))


@cache
def _expected(prompt: tuple[int, ...], count: int) -> Sequence[int]:
    backend = MODEL.cache_backend(block_size=len(prompt) + count, dtype="float32")
    model, caches = Letters(MODEL, backend.layout), list(backend.create_kv_cache(1).values())
    tokens, start = list(prompt), 0
    while len(tokens) < len(prompt) + count:
        (rows,) = model.forward([SequenceSlice(np.array(tokens[start:]), start, [0])], caches)
        start = len(tokens)
        tokens.append(int(rows[0].argmax()))
    return tokens[len(prompt) :]


class Worker:
    """One rank of a worker."""

    def __init__(
        self,
        cache: KVCacheConfig,
        *,
        runtime: Runtime | None = None,
        kind: type[ChecksumModel] = Letters,
        model: ChecksumConfig = MODEL,
        dtype: str = "float32",
        ranks: Ranks = ONE_RANK,
    ) -> None:
        self.runtime = VirtualDevice(Clock(), at_once=True) if runtime is None else runtime
        self.ranks, size = ranks, cache.block_size
        backend = model.shard(ranks.size).cache_backend(block_size=size, dtype=dtype)
        made = kind(model, backend.layout, ranks=ranks)
        self.controller = CacheController(backend, runtime=self.runtime, rank=ranks.rank)
        caches = self.controller.initialize_kv_cache(cache.num_device_blocks, cache.num_host_blocks)
        self.runner = StepRunner(made.forward, self.controller, caches, block_size=size, guess=made.guess, ranks=ranks)
        self.batches: list[BatchRequest] = []

    def run(self, batch: BatchRequest) -> StepResult:
        self.batches.append(batch)
        # As a rank process does: it takes its own message apart.
        own = replace(batch, requests=list(batch.requests), swap_steps=list(batch.swap_steps))
        result = self.runner.run(own)
        self.controller.check()
        return result

    def close(self) -> None:
        self.controller.free()
        self.ranks.close()


class WorkerThread:
    """A worker client whose worker is a thread of this process. `gate` holds batches back while it is cleared."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._inbox: queue.SimpleQueue[BatchRequest | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._on_death: Callable[[str], None] | None = None
        self.gate = threading.Event()
        self.gate.set()

    def listen(
        self, on_message: Callable[[int, StepResult | WorkerReport], None], on_death: Callable[[str], None]
    ) -> None:
        self._on_death = on_death
        self._thread = threading.Thread(target=self._run, args=(on_message,))
        self._thread.start()

    def send(self, batch: BatchRequest) -> None:
        self._inbox.put(batch)

    def die(self, reason: str) -> None:
        assert self._on_death is not None
        self._on_death(reason)

    def close(self, deadline: float | None = None) -> None:
        self.gate.set()
        self._inbox.put(None)
        if self._thread is not None:
            self._thread.join()

    def _run(self, on_message: Callable[[int, StepResult | WorkerReport], None]) -> None:
        while (batch := self._inbox.get()) is not None:
            self.gate.wait()
            on_message(0, self.worker.run(batch))


class Recorder:
    """A sink that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[Delta | Failure] = []

    def __call__(self, event: Delta | Failure) -> None:
        assert not self.ended, "no event follows the last one"
        self.events.append(event)

    @property
    def ended(self) -> bool:
        return bool(self.events) and (isinstance(self.events[-1], Failure) or bool(self.events[-1].finish_reason))

    @property
    def failure(self) -> Failure | None:
        return self.events[-1] if self.events and isinstance(self.events[-1], Failure) else None

    @property
    def deltas(self) -> list[Delta]:
        return [event for event in self.events if isinstance(event, Delta)]

    @property
    def tokens(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def cached(self) -> int:
        """Prompt tokens that came from the cache, once it has ended."""
        usage = self.deltas[-1].usage
        assert usage is not None
        return usage.cached_tokens

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)


class Harness:
    """Engine core and worker, driven step by step."""

    def __init__(
        self,
        config: KVCacheConfig,
        *,
        workers: Sequence[Worker] = (),
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 32,
        fails: str = "",
        storage: Callable[[CacheManager, Harness], StorageTier] | None = None,
        **options: Any,
    ) -> None:
        """One worker, if none are given, of whose copies those of the stream `fails` do. `options` of the core."""
        self.config = config
        self.manager = CacheManager(config)
        self.workers = workers or [
            Worker(config, runtime=VirtualDevice(Clock(), lambda stream: stream == fails, at_once=True))
        ]
        self.worker = self.workers[0]
        self.storage = None if storage is None else storage(self.manager, self)
        self.sent: list[BatchRequest] = []
        self.core = EngineCore(
            self.manager,
            self.sent.append,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            storage=self.storage,
            **options,
        )
        self.scheduler = self.core.scheduler

    @property
    def num_preemptions(self) -> int:
        return self.manager.stats().counters.requests_preempted

    def submit(
        self,
        name: str,
        prompt: Sequence[int],
        max_tokens: int,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008  it is immutable
        *,
        stops: Sequence[str] = (),
        **options: object,
    ) -> Recorder:
        recorder = Recorder()
        self.core.submit(self.generation(name, prompt, max_tokens, recorder, sampling, stops=stops, **options))
        return recorder

    def generation(
        self,
        name: str,
        prompt: Sequence[int],
        max_tokens: int,
        sink: Recorder,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008  it is immutable
        *,
        stops: Sequence[str] = (),
        salt: bytes = b"",
        access: CacheAccess = CacheAccess(),  # noqa: B008  it is immutable
        **options: object,
    ) -> Generation:
        request = GenerationRequest(name, tuple(prompt), max_tokens, sampling, **options)  # type: ignore[arg-type]
        hasher = BlockHasher(self.config.block_size, salt=salt, access=access)
        hasher.extend(prompt)
        return Generation(request, hasher, byte_stream(stops), sink)

    def step(self) -> BatchRequest | None:
        """One batch there and back; None when the core had nothing to send."""
        self.core.step()
        self.manager.check()
        if not self.sent:
            return None
        batch = self.sent.pop()
        assert not self.sent, "exactly one batch is in flight"
        self.work(batch)
        return batch

    def work(self, batch: BatchRequest) -> None:
        self.core.on_step_result(self.worker.run(batch))
        self.manager.check()

    def run(self) -> None:
        """Until nothing is left to do."""
        while self.step() is not None:
            pass
        assert self.core.is_idle
        self.manager.check_idle()


def small(num_device_blocks=8, num_host_blocks=16, **options):
    return KVCacheConfig(num_device_blocks, num_host_blocks, block_size=4, **options)


def random_requests(seed, count):
    """Prompts that share prefixes, some continuing others; every one fits eight blocks of four tokens."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(100) for _ in range(rng.randrange(4, 13))] for _ in range(5)]
    requests = []
    for index in range(count):
        prompt = rng.choice(prefixes) + [rng.randrange(100) for _ in range(rng.randrange(1, 6))]
        output = rng.randrange(1, 9)
        requests.append((f"r{index}", prompt, output))
        if rng.random() < 0.3 and len(prompt) + output < 20:
            prefixes.append(prompt + expected_outputs(prompt, output))
    return requests
