"""This package's CacheManager: `adaptive` is the default."""

from __future__ import annotations

from dataclasses import dataclass, replace

from contender import Contender

from fastdeploy_kvcache_v1 import __version__
from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.contract.messages import NoSpace
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
        config = KVCacheConfig(device, host, block_size=block_size, eviction_policy=kind, max_queued_events=0)
        self.block_size = block_size
        self.manager = CacheManager(replace(config, num_device_blocks=BEFORE_PROFILING))
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
        request.step = manager.take_swap_step()

    def commit(self, request: Request) -> None:
        request.hashes.extend([0])  # the first sampled token
        self.manager.commit(request.id, len(request.tokens))

    def finish(self, request: Request) -> None:
        self.manager.finish(request.id)

    def table(self, request: Request) -> tuple[list[int], int]:
        return self.manager.block_table(request.id), request.match.num_blocks

    def cached_blocks(self) -> int:
        stats = self.manager.stats()
        return stats.device_cached_blocks + stats.host_cached_blocks


CONTENDER = Ours
