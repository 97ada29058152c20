"""A worker without a model: its "KV" is the token itself, so any wrong copy or block table changes the output."""

from __future__ import annotations

import queue
import random
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from fastdeploy_kvcache_v1.batch_request import BatchRequest
from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.embedded.engine.engine_core import EngineCore
from fastdeploy_kvcache_v1.embedded.engine.generation import Delta, Failure, Generation, GenerationRequest
from fastdeploy_kvcache_v1.metadata import CacheAccess, CacheLevel, CacheSwapMetadata, TransferReport, TransferResult
from fastdeploy_kvcache_v1.model.sampler import SamplingParams
from fastdeploy_kvcache_v1.model.step import StepResult, StepTask
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager
from fastdeploy_kvcache_v1.scheduler.cache_utils import BlockHasher
from fastdeploy_kvcache_v1.storage.engine.tier import StorageTier
from tests.embedded.random_text import byte_stream

LETTERS = 26


def next_token(tokens: Sequence[int]) -> int:
    """The "model": a letter that depends on every token before it."""
    return ord("a") + zlib.crc32(b",".join(b"%d" % token for token in tokens)) % LETTERS


def expected_outputs(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class ShadowWorker:
    """Runs batches as the real worker does: evictions, swap-ins, forward. `fails(result)` picks copies that fail."""

    def __init__(self, config: KVCacheConfig, fails: Callable[[TransferResult], bool] = lambda result: False) -> None:
        self._block_size = config.block_size
        self.device: list[list[int | None]] = [[None] * config.block_size for _ in range(config.num_device_blocks)]
        self.host: list[list[int | None]] = [[None] * config.block_size for _ in range(config.num_host_blocks)]
        self._tiers = {CacheLevel.DEVICE: self.device, CacheLevel.HOST: self.host}
        self._fails = fails
        self._last_step = -1
        self.batches: list[BatchRequest] = []

    def run(self, batch: BatchRequest) -> StepResult:
        self.batches.append(batch)
        transfers: list[TransferResult] = []
        lost: set[int] = set()
        for step in batch.swap_steps:
            assert step.step > self._last_step, "swap steps arrive in order"
            self._last_step = step.step
            for copies in step.transfers:
                transfers += self._copy(step.step, copies, self._tiers[copies.source], self._tiers[copies.target])
            lost.update(*(result.target_slots for result in transfers if result.target is CacheLevel.DEVICE))
        tokens, retry = {}, {}
        for task in batch.requests:
            if lost.intersection(task.block_table):
                retry[task.request_id] = "a copy failed"
                continue
            context = self._compute(task)
            if task.needs_logits:
                tokens[task.request_id] = (next_token(context),)
        return StepResult(tokens=tokens, retry=retry, report=TransferReport(tuple(transfers), 0.0, self._last_step))

    def _copy(
        self, step: int, copy: CacheSwapMetadata, source: list[list[int | None]], target: list[list[int | None]]
    ) -> list[TransferResult]:
        if not copy:
            return []
        result = TransferResult(step, copy.source, copy.target, len(copy), 100 * len(copy), 0.25)
        if self._fails(result):
            for slot in copy.target_slots:
                target[slot] = [None] * self._block_size
            return [
                TransferResult(
                    step, copy.source, copy.target, len(copy), 0, 0.0, target_slots=copy.target_slots, error="injected"
                )
            ]
        for source_slot, target_slot in zip(copy.source_slots, copy.target_slots, strict=True):
            target[target_slot] = list(source[source_slot])
        return [result]

    def _compute(self, task: StepTask) -> list[int]:
        """Write the task's tokens; read the whole context back through the block table."""
        size = self._block_size
        for position, token in enumerate(task.token_ids, task.start):
            self.device[task.block_table[position // size]][position % size] = token
        end = task.start + len(task.token_ids)
        context = [self.device[task.block_table[position // size]][position % size] for position in range(end)]
        assert None not in context, f"{task.request_id} reads a position that was never written"
        return [token for token in context if token is not None]


class ShadowWorkerClient:
    """A worker client whose worker is a thread of this process. `gate` holds batches back while it is cleared."""

    def __init__(self, worker: ShadowWorker) -> None:
        self.worker = worker
        self._inbox: queue.SimpleQueue[BatchRequest | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._on_death: Callable[[str], None] | None = None
        self.gate = threading.Event()
        self.gate.set()

    def listen(
        self, on_message: Callable[[int, StepResult | TransferReport], None], on_death: Callable[[str], None]
    ) -> None:
        self._on_death = on_death
        self._thread = threading.Thread(target=self._run, args=(on_message,))
        self._thread.start()

    def send(self, batch: BatchRequest) -> None:
        self._inbox.put(batch)

    def die(self, reason: str) -> None:
        assert self._on_death is not None
        self._on_death(reason)

    def close(self) -> None:
        self.gate.set()
        self._inbox.put(None)
        if self._thread is not None:
            self._thread.join()

    def _run(self, on_message: Callable[[int, StepResult | TransferReport], None]) -> None:
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
    """Engine core and shadow worker, driven step by step."""

    def __init__(
        self,
        config: KVCacheConfig,
        *,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 32,
        fails: Callable[[TransferResult], bool] = lambda result: False,
        storage: Callable[[CacheManager, ShadowWorker], StorageTier] | None = None,
        **options: Any,
    ) -> None:
        """`options` of the core."""
        self.config = config
        self.manager = CacheManager(config)
        self.worker = ShadowWorker(config, fails)
        tier = self.storage = None if storage is None else storage(self.manager, self.worker)
        self.sent: list[BatchRequest] = []
        self.core = EngineCore(
            self.manager,
            self.sent.append,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            storage=tier,
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
        self.core.on_step_result(self.worker.run(batch))
        self.manager.check()
        return batch

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
