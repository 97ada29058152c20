"""Engine, step runner, copies and a real small model of any attention family, in one process."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache

from fastdeploy_kvcache_v1.config import KVCacheConfig, WritePolicy
from fastdeploy_kvcache_v1.model.config import IndexerConfig, random_model
from fastdeploy_kvcache_v1.model.decoder import Decoder
from fastdeploy_kvcache_v1.model.mtp import DraftingDecoder
from fastdeploy_kvcache_v1.model.sampler import SamplingParams
from fastdeploy_kvcache_v1.model.step_runner import StepRunner
from fastdeploy_kvcache_v1.worker.cache_controller import CacheController
from fastdeploy_kvcache_v1.worker.runtime import CpuRuntime
from tests.embedded.shadow import Harness

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


class FamilyEngine:
    """One server without its processes. Copies take a moment, each its own."""

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
        runtime: CpuRuntime | None = None,
        layer_timeout_s: float = 30.0,
        max_num_batched_tokens: int = 48,
        roles: dict[str, object] | None = None,
    ) -> None:
        """`roles`: `remote` or `offered` of the harness."""
        config = KVCacheConfig(
            num_device_blocks,
            num_host_blocks,
            block_size=BLOCK,
            write_policy=policy,
            enable_prefix_caching=caching,
        )
        self.harness = Harness(config, max_num_seqs=3, max_num_batched_tokens=max_num_batched_tokens, **(roles or {}))
        # Whether a load pays is a matter of time; here each is made.
        self.harness.scheduler.load_costs.blocks_to_load = lambda num_host_blocks, *args, **options: num_host_blocks
        self.random = random.Random(seed)
        self.runtime = runtime or CpuRuntime(delay=lambda stream: time.sleep(self.random.random() * 0.0005))
        model, dtype = model_of(family, mtp=mtp), FAMILIES[family][1]
        backend = model.cache_backend(block_size=BLOCK, dtype=dtype)
        self.controller = CacheController(backend, runtime=self.runtime, layer_timeout_s=layer_timeout_s)
        caches = self.controller.initialize_kv_cache(num_device_blocks, num_host_blocks)
        decoder = decoder_of(family, mtp)
        self.runner = StepRunner(
            decoder.forward,
            self.controller,
            caches,
            block_size=BLOCK,
            forward_with_drafts=DraftingDecoder(decoder).forward if mtp else None,
        )

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
        result = self.runner.run(batch)
        assert result.errors == {}
        core.on_step_result(result)
        self.harness.manager.check()
        self.controller.check()
        return True

    def close(self) -> None:
        self.controller.drain(30)
        self.harness.core.on_report(self.runner.take_report())
        while self.step_with(lambda: None):
            pass
        self.controller.drain(30)
        self.harness.core.on_report(self.runner.take_report())
        self.harness.manager.check_idle()
        self.controller.free()
        self.runtime.close()


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


def settle(engine: FamilyEngine) -> None:
    """Until every copy is told."""
    engine.controller.drain(30)
    engine.harness.core.on_report(engine.runner.take_report())


__all__ = ["BLOCK", "FAMILIES", "FamilyEngine", "conversations", "decoder_of", "model_of", "settle"]
