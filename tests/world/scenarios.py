"""Scenarios by name: which host, and what its seed may draw."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fastdeploy_kvcache_v1.config import KVCacheConfig, WritePolicy
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.rank_passes import RankPasses
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.storage import EngineStorage
from fastdeploy_kvcache_v1.storage.attention_store.tier import AttentionStoreTier
from fastdeploy_kvcache_v1.storage.engine.tier import StorageTier
from fastdeploy_kvcache_v1.storage.settings import Prefetch, StorageSettings

from .clients import Clients
from .fastdeploy_host import LEAST_BLOCKS, EngineCache, FastDeployHost
from .ranks import Rank, Worker
from .reports import Reports
from .store import RankMemory, Store, TokenStore, namespace
from .streams import VirtualDevice


def fastdeploy(world: Any, rng: random.Random, *, release: int, backend: str = "") -> None:
    block_size = rng.choice([2, 4])
    device = world.size("device", rng.randrange(16, 32), LEAST_BLOCKS)
    host = world.size("host", rng.choice([8, 20, 60] if backend == "file" else [0, 8, 20, 60]), 0)
    ranks, guess = world.size("ranks", rng.choice([1, 1, 2])), rng.randrange(1, 2 * device)
    policy, threshold = rng.choice(list(WritePolicy)), rng.randrange(1, 4)
    order = rng.choice(["adaptive", "hyperbolic", "lrfu", "lru"])
    seats, budget, shared = rng.randrange(2, 7), rng.choice([8, 24, 64]), rng.choice([0, block_size, 256])
    reports = Reports(world)
    config = KVCacheConfig(
        min(guess, device), host, block_size, policy, threshold, eviction_policy=order, shared_prefill_tokens=shared
    )
    cache = EngineCache(config, budget=budget, reports=reports)
    cache.update_cache_config(SimpleNamespace(total_block_num=device))
    copies = world.chooser.source("copies")

    def copy_fails(stream: str) -> bool:
        return stream == "kv-output" and world.faults.strike("copy to host fails", copies)

    devices = [VirtualDevice(world.clock, copy_fails) for _ in range(ranks)]
    memories = [RankMemory(on_device=backend == "attention_store") if backend else None for _ in devices]
    made = [
        Rank(
            number, each, blocks=device, host_blocks=host, block_size=block_size, tags=world.tags, tell=reports.tell,
            storage=memories[number], clock=world.clock,
        )
        for number, each in enumerate(devices)
    ]  # fmt: skip
    world.clients = Clients(world, block_size=block_size, most=3 * seats, images=rng.random() < 0.3)
    world.host = FastDeployHost(world, cache, Worker(made, world.root), release=release, seats=seats, budget=budget)
    world.others = [SimpleNamespace(events=[(8, reports.arrive)], is_idle=True)]
    if backend:
        add_store(world, rng, backend, cache, memories)


def add_store(world: Any, rng: random.Random, backend: str, cache: EngineCache, memories: Sequence[Any]) -> None:
    settings = StorageSettings(backend, Path("/unused"), prefetch=rng.choice(list(Prefetch)), min_tokens=1)
    on_device = settings.uses_device_tier
    store = (TokenStore if on_device else Store)(world, memories)
    passes = RankPasses(len(memories), world.clock) if on_device else None
    kind = AttentionStoreTier if on_device else StorageTier
    tier = kind(cache.manager, settings, None, store, clock=world.clock, passes=passes)
    storage = EngineStorage(tier, store, lock=cache._lock, find_namespace=namespace, passes=passes)
    cache.use_storage(storage)
    storage.start(run=lambda find: find())
    world.others += [store, TierWatch(tier)]


class TierWatch:
    """Idle when no slot is lent to the store."""

    events = ()

    def __init__(self, tier: StorageTier) -> None:
        self._tier = tier

    @property
    def is_idle(self) -> bool:
        return self._tier.is_idle


SCENARIOS: dict[str, Callable[[Any, random.Random], None]] = {
    "fastdeploy25": partial(fastdeploy, release=25),
    "fastdeploy26": partial(fastdeploy, release=26),
    "fastdeploy25 file": partial(fastdeploy, release=25, backend="file"),
    "fastdeploy26 file": partial(fastdeploy, release=26, backend="file"),
    "fastdeploy26 attention_store": partial(fastdeploy, release=26, backend="attention_store"),
}
