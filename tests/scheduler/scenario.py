"""Words for scenarios: a prompt is a text, a block is one of its characters with everything before it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastdeploy_kvcache_v1.config import KVCacheConfig, WritePolicy
from fastdeploy_kvcache_v1.metadata import (
    Allocation,
    BlockHash,
    CacheLevel,
    CacheSwapMetadata,
    MatchResult,
    SwapStep,
    TransferResult,
)
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager
from fastdeploy_kvcache_v1.scheduler.cache_utils import GivenHashes


def manager(device: int, host: int = 0, policy: str = "write_back", **options: Any) -> CacheManager:
    """What leaves next is the oldest, unless `options` say otherwise: tests know that order."""
    options.setdefault("eviction_policy", "lru")
    return CacheManager(KVCacheConfig(device, host, block_size=1, write_policy=WritePolicy(policy), **options))


def prompt(text: str) -> GivenHashes:
    """One block per character; the last character is the token that is always computed."""
    return GivenHashes([BlockHash(text[: end + 1].encode()) for end in range(len(text))], len(text))


def block(text: str) -> BlockHash:
    """Name of the last block of `text`."""
    return BlockHash(text.encode())


def start(cache: CacheManager, text: str, name: str = "") -> MatchResult:
    """Match and allocate all blocks but the last one; returns the match."""
    match = cache.match_prefix(name or text, prompt(text))
    assert isinstance(cache.allocate(name or text, len(text) - 1), Allocation)
    return match


def run(cache: CacheManager, text: str, name: str = "") -> SwapStep:
    """A whole request: its blocks, all but the last one, end up cached."""
    name = name or text
    start(cache, text, name)
    step = cache.take_swap_step()
    cache.commit(name, len(text) - 1)
    cache.finish(name)
    cache.check()
    return step


def expect(cache: CacheManager, *line: str) -> None:
    """Requests wait with these prompts, the next one first."""
    cache.expect([prompt(text + "!") for text in line])


def cached(cache: CacheManager, text: str) -> list[str]:
    """Tier of each block of the longest cached prefix."""
    cache.match_prefix("probe", prompt(text + "!"))
    nodes = cache.nodes("probe")
    cache.release("probe")
    return [node.status.value for node in nodes]


def pairs(swap: CacheSwapMetadata) -> list[tuple[int, int]]:
    return list(zip(swap.source_slots, swap.target_slots, strict=True))


def fail(cache: CacheManager, step: SwapStep, target: CacheLevel, slots: Iterable[int]) -> list[str]:
    """The copies of `step` into `slots` of tier `target` failed."""
    source = CacheLevel.HOST if target is CacheLevel.DEVICE else CacheLevel.DEVICE
    return cache.transfer_failed(TransferResult(step.step, source, target, 1, 0, 0.0, tuple(slots), "injected"))


def on_host(cache: CacheManager, text: str) -> list[bool]:
    """Which blocks of `text`, all of them cached, have a host copy."""
    cache.match_prefix("probe", prompt(text + "!"))
    nodes = cache.nodes("probe")
    cache.release("probe")
    assert len(nodes) == len(text)
    return [node.host_slot is not None for node in nodes]
