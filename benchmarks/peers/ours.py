"""This package's CacheManager. `kind` is the eviction policy, and perhaps a write policy: `adaptive auto` is the
default.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain

from contender import Contender, Copies

from fastdeploy_kvcache_v1 import __version__
from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.contract.messages import CacheLevel, NoSpace, SwapStep
from fastdeploy_kvcache_v1.scheduler.block_hashing import BlockHasher
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager

BEFORE_PROFILING = 144


@dataclass
class Request:
    id: str
    tokens: list[int]


class Ours(Contender):
    version = __version__

    def __init__(self, device: int, host: int, block_size: int, kind: str) -> None:
        eviction, _, write = kind.partition(" ")
        policies = {"eviction_policy": eviction, "write_policy": write or "auto"}
        config = KVCacheConfig(device, host, block_size=block_size, max_queued_events=0, **policies)
        self.block_size = block_size
        self.steps: list[SwapStep] = []
        self.manager = CacheManager(replace(config, num_device_blocks=BEFORE_PROFILING), lambda: self.now)
        self.manager.resize_device_pool(device)

    def arrive(self, number: int, tokens: list[int]) -> Request:
        return Request(str(number), tokens)

    def key(self, request: Request) -> None:
        request.hashes = BlockHasher(self.block_size)
        request.hashes.extend(request.tokens)

    def start(self, request: Request) -> None:
        manager, tokens = self.manager, len(request.tokens)
        request.match = manager.match_prefix(request.id, request.hashes)
        assert not isinstance(manager.allocate(request.id, tokens), NoSpace), "the device tier must hold the window"
        self.steps.append(manager.take_swap_step())

    def commit(self, request: Request) -> None:
        request.hashes.extend([0])  # the first sampled token
        self.manager.commit(request.id, len(request.tokens))

    def finish(self, request: Request) -> None:
        self.manager.finish(request.id)

    def table(self, request: Request) -> tuple[list[int], int]:
        return self.manager.block_table(request.id), request.match.num_blocks

    def copies(self) -> Iterable[Copies]:
        steps, self.steps = self.steps, []
        for transfer in chain.from_iterable(step.transfers for step in steps):
            yield Copies(transfer.target is CacheLevel.HOST, transfer.source_slots, transfer.target_slots)

    def cached_blocks(self) -> int:
        stats = self.manager.stats()
        return stats.device_cached_blocks + stats.host_cached_blocks


CONTENDER = Ours
