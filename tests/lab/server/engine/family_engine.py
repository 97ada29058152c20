"""The harness over a checksum model of any cache layout, on one rank or more, with real copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastdeploy_kvcache_v1.attention import layouts
from fastdeploy_kvcache_v1.config import KVCacheConfig, WritePolicy
from fastdeploy_kvcache_v1.contract.messages import BatchRequest
from fastdeploy_kvcache_v1.lab.model.checksum import ChecksumModel
from fastdeploy_kvcache_v1.lab.model.config import ChecksumConfig
from fastdeploy_kvcache_v1.lab.model.ranks import Ranks, rank_pipes
from fastdeploy_kvcache_v1.lab.model.sampler import SamplingParams
from fastdeploy_kvcache_v1.lab.model.step import StepResult
from fastdeploy_kvcache_v1.worker.runtime import CpuRuntime
from tests.lab.server.harness import Harness, Worker

BLOCK = 8

FAMILIES = {
    **{family: (family, "float32") for family in layouts.FAMILIES},
    "mla": ("mla", "bfloat16"),
    "gqa, fp8": ("gqa", "block_wise_fp8"),
    "gqa, bfloat16": ("gqa", "bfloat16"),
}
"""Family and dtype of the cache."""


def rank_group(size: int, timeout_s: float = 60.0) -> list[Ranks]:
    """Ranks in this process, each for a thread of its own."""
    pipes = rank_pipes(size)
    return [Ranks(rank, peers, size=size, timeout_s=timeout_s) for rank, peers in enumerate(pipes)]


class FamilyEngine(Harness):
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
        **options: Any,
    ) -> None:
        """`options` of the harness."""
        cache = KVCacheConfig(
            num_device_blocks, num_host_blocks, block_size=BLOCK, write_policy=policy, enable_prefix_caching=caching
        )
        kind, dtype = FAMILIES[family][:2]  # the same tokens with and without the draft layer
        config = ChecksumConfig(kind, num_layers=2, num_draft_layers=int(mtp), guessable=True)
        model = {"kind": ChecksumModel, "model": config, "dtype": dtype}
        workers = [
            Worker(cache, runtime=runtime, ranks=ranks, **model)
            for runtime, ranks in zip(runtimes or [CpuRuntime() for _ in range(size)], rank_group(size), strict=True)
        ]
        self.controllers, self.runners = [each.controller for each in workers], [each.runner for each in workers]
        sizes = {"max_num_seqs": 3, "max_num_batched_tokens": max_num_batched_tokens, "num_ranks": size}
        super().__init__(cache, workers=workers, **sizes, **options)
        self._threads = ThreadPoolExecutor(size)
        self._count = 0
        self.before_batch: Callable[[BatchRequest], None] = lambda batch: None

    @property
    def counters(self):
        return self.manager.stats().counters

    @property
    def drafts(self) -> tuple[int, int]:
        """Verified, and right."""
        return self.core.counters.draft_tokens, self.core.counters.accepted_draft_tokens

    def ask(self, prompt: list[int], *, max_tokens: int = 10, temperature: float = 0.0, **options: object) -> list[int]:
        self._count += 1
        recorder = self.submit(f"r{self._count}", prompt, max_tokens, SamplingParams(temperature, seed=5), **options)
        while not recorder.ended:
            assert self.step() is not None, "there is nothing to do"
        assert recorder.failure is None
        return recorder.tokens

    def push_out(self) -> None:
        """Other prompts take the device tier."""
        for number in range(4):
            self.ask([50 + number] * 60, max_tokens=1)

    def results(self) -> list[StepResult]:
        """What each rank answers to the next batch; the engine takes the answers."""
        self._results: list[StepResult] = []
        self.step()
        return self._results

    def work(self, batch: BatchRequest) -> None:
        self.before_batch(batch)
        self._results = list(self._threads.map(lambda worker: worker.run(batch), self.workers))
        for rank, result in enumerate(self._results):
            self.core.on_step_result(result, rank)
        self.core.check()

    def settle(self) -> None:
        """Until every copy is told."""
        for rank, worker in enumerate(self.workers):
            worker.controller.transfers.drain(30)
            self.core.on_report(worker.runner.take_report(), rank)

    def close(self) -> None:
        self.settle()
        while self.step() is not None:
            pass
        self.settle()
        self.manager.check_idle()
        self._threads.shutdown()
        for worker in self.workers:
            worker.close()
