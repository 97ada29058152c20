"""Scenarios by name: which host, and what its seed may draw."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from fastdeploy_kvcache_v1.config import KVCacheConfig, WritePolicy

from .clients import Clients
from .fastdeploy_host import LEAST_BLOCKS, EngineCache, FastDeployHost
from .ranks import Rank, Worker
from .reports import Reports
from .streams import VirtualDevice


def fastdeploy(world: Any, rng: random.Random, *, release: int) -> None:
    block_size = rng.choice([2, 4])
    device = world.size("device", rng.randrange(24, 48), LEAST_BLOCKS)
    host = world.size("host", rng.choice([0, 12, 40, 200]), 0)
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
    made = [
        Rank(n, each, blocks=device, host_blocks=host, block_size=block_size, tags=world.tags, tell=reports.tell)
        for n, each in enumerate(devices)
    ]
    world.clients = Clients(world, block_size=block_size, most=3 * seats, images=rng.random() < 0.3)
    world.host = FastDeployHost(world, cache, Worker(made, world.root), release=release, seats=seats, budget=budget)
    world.others = [SimpleNamespace(events=[(8, reports.arrive)], is_idle=True)]


SCENARIOS: dict[str, Callable[[Any, random.Random], None]] = {
    "fastdeploy25": partial(fastdeploy, release=25),
    "fastdeploy26": partial(fastdeploy, release=26),
}
