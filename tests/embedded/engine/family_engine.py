"""Engine, step runner, copies and a checksum model of any cache layout, in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from fastdeploy_kvcache_v1.batch_request import BatchRequest
from fastdeploy_kvcache_v1.config import KVCacheConfig, WritePolicy
from fastdeploy_kvcache_v1.model.checksum import ChecksumModel
from fastdeploy_kvcache_v1.model.config import ChecksumConfig
from fastdeploy_kvcache_v1.model.ranks import Ranks, rank_pipes
from fastdeploy_kvcache_v1.model.sampler import SamplingParams
from fastdeploy_kvcache_v1.model.step import StepResult
from fastdeploy_kvcache_v1.model.step_runner import StepRunner
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager
from fastdeploy_kvcache_v1.storage.engine.tier import StorageTier
from fastdeploy_kvcache_v1.worker.cache_controller import CacheController
from fastdeploy_kvcache_v1.worker.runtime import CpuRuntime
from tests.embedded.shadow import Harness

BLOCK = 8

FAMILIES = {
    "gqa": ("gqa", "float32"),
    "gqa, fp8": ("gqa", "block_wise_fp8"),
    "gqa, bfloat16": ("gqa", "bfloat16"),
    "mla": ("mla", "bfloat16"),
    "dsa": ("dsa", "float32"),
}
"""Family and dtype of the cache."""


def model_of(family: str, *, mtp: bool) -> ChecksumConfig:
    """The same tokens with and without the draft layer."""
    return ChecksumConfig(FAMILIES[family][0], num_layers=2, num_draft_layers=int(mtp), guessable=True)


def rank_group(size: int, timeout_s: float = 60.0) -> list[Ranks]:
    """Ranks in this process, each for a thread of its own."""
    pipes = rank_pipes(size)
    return [Ranks(rank, peers, size=size, timeout_s=timeout_s) for rank, peers in enumerate(pipes)]


class FamilyEngine:
    """A server without its processes, with `size` worker ranks."""

    def __init__(
        self,
        family: str,
        *,
        mtp: bool = False,
        num_device_blocks: int = 26,
        num_host_blocks: int = 0,
        caching: bool = True,
        runtimes: Sequence[CpuRuntime] = (),
        size: int = 1,
        max_num_batched_tokens: int = 48,
        policy: WritePolicy = WritePolicy.WRITE_BACK,
        storage: Callable[[CacheManager, FamilyEngine], StorageTier] | None = None,
        roles: dict[str, object] | None = None,
    ) -> None:
        """`roles`: `remote` or `offered` of the harness. `storage` is made when the engine has its memory."""
        cache = KVCacheConfig(
            num_device_blocks, num_host_blocks, block_size=BLOCK, write_policy=policy, enable_prefix_caching=caching
        )
        self.harness = Harness(
            cache,
            max_num_seqs=3,
            max_num_batched_tokens=max_num_batched_tokens,
            num_ranks=size,
            storage=None if storage is None else lambda manager, worker: storage(manager, self),
            **(roles or {}),
        )
        self.runtimes = list(runtimes) or [CpuRuntime() for _ in range(size)]
        config = model_of(family, mtp=mtp)
        backend = config.shard(size).cache_backend(block_size=BLOCK, dtype=FAMILIES[family][1])
        self.controllers: list[CacheController] = []
        self.runners: list[StepRunner] = []
        self.ranks = rank_group(size)
        for ranks, runtime in zip(self.ranks, self.runtimes, strict=True):
            model = ChecksumModel(config, backend.layout, ranks=ranks)
            controller = CacheController(backend, runtime=runtime, rank=ranks.rank)
            caches = controller.initialize_kv_cache(num_device_blocks, num_host_blocks)
            self.controllers.append(controller)
            self.runners.append(
                StepRunner(model.forward, controller, caches, block_size=BLOCK, guess=model.guess, ranks=ranks)
            )
        self._threads = ThreadPoolExecutor(size)
        self._count = 0
        self.before_batch: Callable[[BatchRequest], None] = lambda batch: None

    @property
    def counters(self):
        return self.harness.manager.stats().counters

    @property
    def drafts(self) -> tuple[int, int]:
        """Verified, and right."""
        counters = self.harness.core.counters
        return counters.draft_tokens, counters.accepted_draft_tokens

    def ask(self, prompt: list[int], *, max_tokens: int = 10, temperature: float = 0.0, **options: object) -> list[int]:
        self._count += 1
        sampling = SamplingParams(temperature, seed=5)
        recorder = self.harness.submit(f"r{self._count}", prompt, max_tokens, sampling, **options)
        while not recorder.ended:
            self.step()
        assert recorder.failure is None
        return recorder.tokens

    def push_out(self) -> None:
        """Other prompts take the device tier."""
        for number in range(4):
            self.ask([50 + number] * 60, max_tokens=1)

    def results(self) -> list[StepResult]:
        """What each rank answers to the next batch; the engine takes the answers."""
        core = self.harness.core
        core.step()
        if not self.harness.sent:
            return []
        batch = self.harness.sent.pop()
        self.before_batch(batch)
        # As rank processes do: each takes its own message apart.
        batches = [
            replace(batch, requests=list(batch.requests), swap_steps=list(batch.swap_steps)) for _ in self.runners
        ]
        results = list(self._threads.map(lambda runner, batch: runner.run(batch), self.runners, batches))
        for rank, result in enumerate(results):
            core.on_step_result(result, rank)
        core.check()
        for controller in self.controllers:
            controller.check()
        return results

    def step(self) -> None:
        assert self.results(), "there is nothing to do"

    def settle(self) -> None:
        """Until every copy is told."""
        for rank, controller in enumerate(self.controllers):
            controller.drain(30)
            self.harness.core.on_report(self.runners[rank].take_report(), rank)

    def close(self) -> None:
        self.settle()
        while self.results():
            pass
        self.settle()
        self.harness.manager.check_idle()
        self._threads.shutdown()
        for controller, runtime in zip(self.controllers, self.runtimes, strict=True):
            controller.free()
            runtime.close()
        for part in self.ranks:
            part.close()
