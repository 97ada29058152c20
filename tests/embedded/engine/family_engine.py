"""Engine, step runner, copies and a real small model of any attention family, in one process."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache

from fastdeploy_kvcache_v1.config import KVCacheConfig, WritePolicy
from fastdeploy_kvcache_v1.embedded.worker.share_ends import ShareEnds, make_share_ends
from fastdeploy_kvcache_v1.model.config import IndexerConfig, random_model
from fastdeploy_kvcache_v1.model.decoder import Decoder
from fastdeploy_kvcache_v1.model.mtp import DraftingDecoder
from fastdeploy_kvcache_v1.model.ranks import ONE_RANK, RankGroup, Ranks
from fastdeploy_kvcache_v1.model.sampler import SamplingParams
from fastdeploy_kvcache_v1.model.step_runner import StepRunner
from fastdeploy_kvcache_v1.worker.cache_controller import CacheController
from fastdeploy_kvcache_v1.worker.host_share import HostShare
from fastdeploy_kvcache_v1.worker.runtime import CpuRuntime
from tests.embedded.shadow import Harness
from tests.worker.chosen_runtime import ChosenRuntime

BLOCK = 8

FAMILIES = {
    "gqa": ("gqa", "float32"),
    "gqa, fp8": ("gqa", "block_wise_fp8"),
    "window": ("window", "bfloat16"),
    "mla": ("mla", "bfloat16"),
    "dsa": ("dsa", "float32"),
}
"""Model family and cache dtype."""


def model_of(family: str, *, mtp: bool):
    """The same weights with and without the draft layer."""
    config = replace(random_model(FAMILIES[family][0], mtp=True), num_layers=2, num_draft_layers=int(mtp))
    if config.sliding_window is not None:
        config = replace(config, sliding_window=24)
    if config.indexer is not None:
        config = replace(config, indexer=IndexerConfig(num_heads=2, head_dim=128, topk=16))
    return config


@cache
def decoder_of(family: str, mtp: bool) -> Decoder:
    return Decoder.load(None, model_of(family, mtp=mtp))


def rank_group(size: int, timeout_s: float = 60.0) -> list[Ranks]:
    """Ranks in this process, each for a thread of its own."""
    if size == 1:
        return [ONE_RANK]
    pairs = [socket.socketpair() for _ in range(size - 1)]
    hub = RankGroup(0, [mine for mine, _ in pairs], size=size, timeout_s=timeout_s)
    others = [RankGroup(rank, [theirs], size=size, timeout_s=timeout_s) for rank, (_, theirs) in enumerate(pairs, 1)]
    return [hub, *others]


def host_shares(size: int) -> list[HostShare]:
    """One host pool for ranks in this process."""
    with make_share_ends(size) as ends:
        kept = [ShareEnds(os.dup(each.file), tuple(map(os.dup, each.links))) for each in ends]
    return [each.open(rank) for rank, each in enumerate(kept)]


@cache
def rank_decoders(family: str, mtp: bool, size: int) -> list[tuple[Ranks, Decoder]]:
    if size == 1:
        return [(ONE_RANK, decoder_of(family, mtp))]
    return [(ranks, Decoder.load(None, model_of(family, mtp=mtp), ranks)) for ranks in rank_group(size)]


class FamilyEngine:
    """One server without its processes; with `size` worker ranks. Copies end when a chooser says so; where ranks
    share a host pool, which has threads of its own, they end when they are done.
    """

    def __init__(
        self,
        family: str,
        *,
        mtp: bool,
        policy: WritePolicy = WritePolicy.WRITE_BACK,
        num_device_blocks: int = 26,
        num_host_blocks: int = 0,
        caching: bool = True,
        seed: int = 0,
        runtimes: Sequence[CpuRuntime] = (),
        size: int = 1,
        layer_timeout_s: float = 30.0,
        max_num_batched_tokens: int = 48,
        roles: dict[str, object] | None = None,
    ) -> None:
        """`roles`: `remote` or `offered` of the harness."""
        self.shares_host = size > 1 and num_host_blocks > 0 and model_of(family, mtp=mtp).ranks_cache_alike
        config = KVCacheConfig(
            num_device_blocks,
            num_host_blocks,
            block_size=BLOCK,
            write_policy=policy,
            enable_prefix_caching=caching,
        )
        self.harness = Harness(
            config,
            max_num_seqs=3,
            max_num_batched_tokens=max_num_batched_tokens,
            num_ranks=size,
            ranks_share_host=self.shares_host,
            **(roles or {}),
        )
        # Whether a load pays is a matter of time; here each is made.
        self.harness.scheduler.load_costs.blocks_to_load = lambda num_host_blocks, *args, **options: num_host_blocks
        self.random = random.Random(seed)
        self.runtimes = list(runtimes) or [
            CpuRuntime() if self.shares_host else ChosenRuntime(seed + rank) for rank in range(size)
        ]
        model, dtype = model_of(family, mtp=mtp).shard(size), FAMILIES[family][1]
        self.shares = host_shares(size) if self.shares_host else [None] * size
        self.controllers: list[CacheController] = []
        self.runners: list[StepRunner] = []
        parts = zip(rank_decoders(family, mtp, size), self.runtimes, self.shares, strict=True)
        for (ranks, decoder), runtime, share in parts:
            backend = model.cache_backend(block_size=BLOCK, dtype=dtype)
            controller = CacheController(
                backend, runtime=runtime, layer_timeout_s=layer_timeout_s, rank=ranks.rank, host_share=share
            )
            caches = controller.initialize_kv_cache(num_device_blocks, num_host_blocks)
            runner = StepRunner(
                decoder.forward,
                controller,
                caches,
                block_size=BLOCK,
                on_progress=getattr(runtime, "turn", lambda: None),
                forward_with_drafts=DraftingDecoder(decoder).forward if mtp else None,
                ranks=ranks,
            )
            self.controllers.append(controller)
            self.runners.append(runner)
        self.controller, self.runner = self.controllers[0], self.runners[0]
        self._threads = ThreadPoolExecutor(size)

    @property
    def counters(self):
        return self.harness.manager.stats().counters

    @property
    def drafts(self) -> tuple[int, int]:
        """Verified, and right."""
        counters = self.harness.core.counters
        return counters.draft_tokens, counters.accepted_draft_tokens

    def ask(self, *prompts: list[int], max_tokens: int = 10, temperature: float = 0.0) -> list[list[int]]:
        """The outputs of requests that come together."""
        recorders = [
            self.harness.submit(f"r{self.random.random()}", prompt, max_tokens, SamplingParams(temperature, seed=5))
            for prompt in prompts
        ]
        while not all(recorder.ended for recorder in recorders):
            self.step()
        assert [recorder.failure for recorder in recorders] == [None] * len(prompts)
        return [recorder.tokens for recorder in recorders]

    def step(self) -> None:
        assert self.step_with(lambda: None), "there is nothing to do"

    def step_with(self, meanwhile: Callable[[], None]) -> bool:
        """One batch there and back; `meanwhile` happens while it is with the worker. False if there is none."""
        core = self.harness.core
        core.step()
        if not self.harness.sent:
            return False
        batch = self.harness.sent.pop()
        meanwhile()
        # As rank processes do: each takes its own message apart.
        batches = [
            replace(batch, requests=list(batch.requests), swap_steps=list(batch.swap_steps)) for _ in self.runners
        ]
        results = list(self._threads.map(lambda runner, batch: runner.run(batch), self.runners, batches))
        answers = list(enumerate(results))
        self.random.shuffle(answers)
        for rank, result in answers:
            assert result.errors == {}
            core.on_step_result(result, rank)
        core.check()
        for controller in self.controllers:
            controller.check()
        return True

    def settle(self) -> None:
        """Until every copy is told, those of the ranks in any order."""
        for rank in self.random.sample(range(len(self.runners)), len(self.runners)):
            if isinstance(self.runtimes[rank], ChosenRuntime):
                self.runtimes[rank].quiet()
            self.controllers[rank].drain(30)
            self.harness.core.on_report(self.runners[rank].take_report(), rank)

    def close(self) -> None:
        self.settle()
        while self.step_with(lambda: None):
            pass
        self.settle()
        self.harness.manager.check_idle()
        self._threads.shutdown()
        for controller, runtime in zip(self.controllers, self.runtimes, strict=True):
            controller.free()
            runtime.close()
        for share in self.shares:
            if share is not None:
                share.close()


def conversations(engine: FamilyEngine) -> list[list[int]]:
    """Outputs of three conversations of three turns that push each other out, and of a fourth that continues one.

    Every prompt is made from the outputs before it, so one wrong token changes all that follow.
    """
    rng = random.Random(1)
    system = [rng.randrange(32, 127) for _ in range(20)]
    texts = [system + [rng.randrange(32, 127) for _ in range(rng.randrange(20, 60))] for _ in range(3)]
    outputs: list[list[int]] = []
    for turn in range(3):
        for index in range(3):
            answer = engine.ask(texts[index], temperature=0.6 if index == 1 else 0.0)[0]
            outputs.append(answer)
            texts[index] = texts[index] + answer + [rng.randrange(32, 127) for _ in range(6 + turn)]
    return outputs + engine.ask(*([*text[:-5], 40, 41, 42] for text in texts))


__all__ = ["BLOCK", "FAMILIES", "FamilyEngine", "conversations", "decoder_of", "model_of", "rank_group"]
