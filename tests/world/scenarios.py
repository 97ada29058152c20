"""Scenarios by name: the host of each, and the sizes and settings that a seed draws."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from fastdeploy_kvcache_v1.config import KVCacheConfig, WritePolicy
from fastdeploy_kvcache_v1.fastdeploy_integration.engine import adapter
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.rank_passes import RankPasses
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.storage import EngineStorage
from fastdeploy_kvcache_v1.lab.server.engine.offered_prefills import OfferedPrefills
from fastdeploy_kvcache_v1.lab.server.engine.remote_prefills import RemotePrefills
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager
from fastdeploy_kvcache_v1.storage.attention_store.tier import AttentionStoreTier
from fastdeploy_kvcache_v1.storage.engine.tier import StorageTier
from fastdeploy_kvcache_v1.storage.settings import Prefetch, StorageSettings
from fastdeploy_kvcache_v1.transfer.settings import TransferSettings
from tests.storage.values import namespace

from .clients import Clients
from .embedded_host import EmbeddedHost, Engine, EngineRank
from .fastdeploy_host import LEAST_BLOCKS, FastDeployHost
from .ranks import Rank, Reports, Worker
from .resource_manager import EngineCache, ResourceManager
from .roles import HERE, Roles
from .store import Index, Store, TokenStore
from .streams import VirtualDevice
from .weight_updates import Updater


def fastdeploy(
    world: Any, rng: random.Random, *, release: int = 0, backend: str = "", least: int = LEAST_BLOCKS, make: Any = None
) -> None:
    """`make` makes another host than the one by the rules of `release`."""
    block_size = rng.choice([2, 4])
    device = world.size("device", rng.randrange(least, 32), least)
    host = world.size("host", rng.choice([8, 20, 60] if backend == "file" else [0, 8, 20, 60]), 0)
    ranks, guess = world.size("ranks", rng.choice([1, 1, 2])), rng.randrange(1, 2 * device)
    policy, threshold = rng.choice(list(WritePolicy)), rng.randrange(1, 4)
    order = rng.choice(["adaptive", "adaptive", "lru", "lru"])
    seats, budget, shared = rng.randrange(2, 7), rng.choice([8, 24, 64]), rng.choice([0, block_size, 256])
    reports = Reports(world)
    config = KVCacheConfig(
        min(guess, device),
        host,
        block_size,
        write_policy=policy,
        write_through_threshold=threshold,
        eviction_policy=order,
        shared_prefill_tokens=shared,
    )
    sizes = {"blocks": device, "host_blocks": host, "block_size": block_size}
    worker = make_worker(world, reports, ranks, backend=backend, **sizes)
    world.clients = Clients(world, block_size=block_size, most=3 * seats, images=rng.random() < 0.3)
    clocked = patch.object(adapter, "CacheManager", partial(CacheManager, clock=world.clock))
    if make is None:
        with clocked:
            cache = EngineCache(config, reports=reports)
        cache.update_cache_config(SimpleNamespace(total_block_num=device))
        manager = ResourceManager(cache, release=release, seats=seats, budget=budget)
        world.host = FastDeployHost(world, manager, worker, is_26=release == 26)
    else:
        with clocked:
            world.host = make(
                world, rng, worker, reports, config, device, seats=seats, max_tokens=budget, backend=backend
            )
    trust(world, world.host.cache_manager.manager)
    world.others, world.free_stuck = [reports], world.host.free_stuck
    if backend:
        add_store(world, rng, backend, world.host.cache_manager, worker.ranks)


def trust(world: Any, manager: CacheManager) -> None:
    """Let half of the servers evict by what clients tell from the start, as if they had learned that it pays."""
    manager._history.judge.trusts = world.source("trust").random() < 0.5


def make_worker(
    world: Any, reports: Reports, num_ranks: int = 1, kind: type[Worker] = Worker, **options: Any
) -> Worker:
    copies = failing(world, "", {"kv-swap_out": "host"})
    ranks = [
        Rank(
            number, VirtualDevice(world.clock, copies), tags=world.tags, tell=reports.tell, clock=world.clock,
            **options,
        )
        for number in range(num_ranks)
    ]  # fmt: skip
    return kind(ranks, world.root)


def failing(world: Any, of: str, streams: dict[str, str]) -> Callable[[str], bool]:
    """Return a function that says whether a copy of a stream fails. `streams` maps a stream to its target tier."""
    rng = world.source(f"{of}copies")
    return lambda stream: stream in streams and world.faults.strike(f"copy to {streams[stream]} fails", rng)


def updating(world: Any, rng: random.Random, *, make: Callable[..., None], **options: Any) -> None:
    """Weights change while requests run and arrive, without a pause."""
    make(world, rng, **options)
    world.others.append(Updater(world, world.host, rng))


def add_store(world: Any, rng: random.Random, backend: str, cache: EngineCache, ranks: Sequence[Rank]) -> None:
    settings = StorageSettings(backend, prefetch=rng.choice(list(Prefetch)), min_tokens=1)
    passes = RankPasses(len(ranks), world.clock) if settings.uses_device_tier else None
    store = make_store(world, settings, ranks, cache.manager, None, passes)
    storage = EngineStorage(store.tier, store, lock=cache._lock, find_namespace=namespace, passes=passes)
    cache.use_storage(storage)
    storage.start(run=lambda find: find())


def make_store(
    world: Any, settings: StorageSettings, ranks: Sequence[Any], manager: CacheManager, name: Any, passes: Any = None
) -> Store:
    """Make a store and its tier."""
    kind = Index if settings.flush_only else TokenStore if settings.uses_device_tier else Store
    store = kind(world, ranks)
    make = AttentionStoreTier if settings.uses_device_tier else StorageTier
    store.tier = make(manager, settings, name, store, clock=world.clock, passes=passes)
    if kind is Store and "store is busy" in world.faults.on:
        store.tier._stores.piece_blocks = store.tier._stores.pieces_under_way = 1
    world.others.append(store)
    if settings.flush_only:
        world.last_checks.append(store.check_idle)
    return store


def embedded(world: Any, rng: random.Random, *, backend: str = "", has_roles: bool = False) -> None:
    block_size = rng.choice([2, 4])
    seats, budget = rng.randrange(2, 7), rng.choice([8, 24, 64])
    world.clients = Clients(world, block_size=block_size, most=3 * seats, kinds=3 if has_roles else 8)
    if not has_roles:
        engine = make_engine(world, rng, "", block_size, backend=backend, seats=seats, budget=budget)
        world.host = EmbeddedHost(world, engine)
        return
    asker, patience = SimpleNamespace(), 10.0 if "answer is lost" in world.faults.on else 1e9
    settings = TransferSettings(secret=bytes(16), silence_s=patience, wait_s=patience)
    ranks, values = world.size("ranks", rng.choice([1, 1, 3])), {}
    remote = RemotePrefills(asker, [HERE] * ranks, settings, block_size=block_size, vocab_size=264, clock=world.clock)
    both = {"backend": backend, "seats": seats, "budget": budget, "values": values}
    decode = make_engine(world, rng, "", block_size, remote=remote, **both)
    prefill = make_engine(world, rng, "prefill ", block_size, offered=OfferedPrefills(ranks), **both)
    world.host = Roles(world, prefill, decode, ranks)
    asker.ask, asker.drop = world.host.ask, world.host.drop


def make_engine(
    world: Any, rng: random.Random, of: str, block_size: int, *, backend: str = "", values: Any = None, **options: Any
) -> Engine:
    device = world.size(f"{of}device", rng.randrange(16, 28), LEAST_BLOCKS)
    host = world.size(f"{of}host", rng.choice([8, 20, 60] if backend == "file" else [0, 8, 20, 60]), 0)
    policy, threshold = rng.choice(list(WritePolicy)), rng.randrange(1, 4)
    shared, flush_only, on_device, store = rng.choice([0, block_size, 256]), False, False, None
    if backend:
        settings = StorageSettings(backend, prefetch=rng.choice(list(Prefetch)), min_tokens=1)
        flush_only = backend == "attention_store" and rng.random() < 0.3
        settings = replace(settings, flush_only=flush_only)
        on_device = settings.uses_device_tier
    config = KVCacheConfig(
        device, host, block_size, write_policy=policy, write_through_threshold=threshold, shared_prefill_tokens=shared,
        max_queued_events=10**6 if flush_only else 0,
    )  # fmt: skip
    manager = CacheManager(config, clock=world.clock)
    trust(world, manager)
    copies = failing(world, of, {"kv-swap_out": "host", "kv-swap_in": "device"})
    rank = EngineRank(
        VirtualDevice(world.clock, copies), blocks=device, host_blocks=host, block_size=block_size,
        tags=world.tags, on_device=on_device, drafts=bool(world.size(f"{of}drafts", rng.choice([0, 1]), 0)),
    )  # fmt: skip
    if backend:
        store = make_store(world, settings, [rank], manager, namespace())
        store.namespace, store.values = namespace().digest, store.values if values is None else values
    tier = None if store is None else store.tier
    engine = Engine(world, manager, rank, storage=tier, pace=rng.choice([0.1, 1.0, 100.0, 100.0]), **options)
    if store is not None:
        store.listen(engine.core.on_storage)
    return engine


SCENARIOS: dict[str, Callable[[Any, random.Random], None]] = {
    "fastdeploy25": partial(fastdeploy, release=25),
    "fastdeploy26": partial(fastdeploy, release=26),
    "fastdeploy25 updates": partial(updating, make=fastdeploy, release=25),
    "fastdeploy26 updates": partial(updating, make=fastdeploy, release=26),
    "fastdeploy26 file updates": partial(updating, make=fastdeploy, release=26, backend="file"),
    "fastdeploy25 file": partial(fastdeploy, release=25, backend="file"),
    "fastdeploy26 file": partial(fastdeploy, release=26, backend="file"),
    "fastdeploy26 attention_store": partial(fastdeploy, release=26, backend="attention_store"),
    "embedded": embedded,
    "embedded file": partial(embedded, backend="file"),
    "embedded attention_store": partial(embedded, backend="attention_store"),
    "embedded roles": partial(embedded, has_roles=True),
    "embedded roles file": partial(embedded, has_roles=True, backend="file"),
}
