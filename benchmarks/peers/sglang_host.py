"""SGLang's cache with its hierarchical cache behind it: the tree, its controller and the slots of a host pool.

The host pool has no memory, one layer, and makes no copies. Events of PyTorch's CPU device are done at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from threading import Event
from typing import Any

import torch
from contender import Copies
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.pool_host import HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.pool_host.base import HostKVCache
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang_tree import Request, SGLang


class HostPool(HostKVCache):
    """Hands out slots, and notes copies."""

    get_size_per_token = init_kv_buffer = None
    get_data_page = get_dummy_flat_data_page = set_from_flat_data_page = None

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.noted: list[tuple[bool, Any, Any]] = []
        super().__init__(
            dtype=torch.bfloat16, device_capacity_tokens=0, size_per_token=1, start_layer=0, end_layer=1,
            host_to_device_ratio=0, host_size=0, page_size=block_size, layout="layer_first", pin_memory=False,
            device="cpu", is_dummy=True, host_token_capacity=num_blocks * block_size,
        )  # fmt: skip

    def backup_from_device_all_layer(self, device_pool: Any, host_indices: Any, device_indices: Any, _: str) -> None:
        self.noted.append((True, device_indices, host_indices))

    def load_to_device_per_layer(
        self, device_pool: Any, host_indices: Any, device_indices: Any, layer: int, _: str, *, is_draft: bool = False
    ) -> None:
        self.noted.append((False, host_indices, device_indices))


class HiCache(SGLang):
    """`kind` goes on with a comma and the write policy: `unified rust, write_through` is the default."""

    def __init__(self, device: int, host: int, block_size: int, kind: str) -> None:
        core, _, policy = kind.partition(", ")
        super().__init__(device, 0, block_size, core)
        tree, memory = self.tree, self.slots.get_kvcache()
        memory.layer_num, memory.device, memory.register_layer_transfer_counter = 1, "cpu", lambda counter: None
        self.pool = HostPool(host, block_size)
        entry = PoolEntry(PoolName.KV, self.pool, memory, lambda layer: layer, is_primary_index_anchor=True)
        tree.host_pool_group = HostPoolGroup([entry])
        tree.cache_controller = HybridCacheController(
            self.slots, tree.host_pool_group, block_size, None, Event(), write_policy=policy, io_backend="kernel"
        )
        tree.components[ComponentType.FULL]._full_kv_pool_host = self.pool
        tree.tree_core.set_hicache_enabled()
        tree.write_through_threshold = 1 if policy == "write_through" else 2
        tree.is_write_back = policy == "write_back"
        tree.load_back_threshold = 10

    def start(self, request: Request) -> None:
        self.tree.check_hicache_events()  # the copies of the last step have ended
        super().start(request)
        self.tree.ready_to_load_host_cache()

    def match(self, request: Request) -> Any:
        tree, match = self.tree, super().match(request)
        if match.host_hit_length:
            given = InitLoadBackParams(match.best_match_node, match.host_hit_length, req=request)
            loaded, request.last_node = tree.init_load_back(given)
            request.prefix_len += loaded
            request.kv.cache_protected_len = request.prefix_len
        return match

    def commit(self, request: Request) -> None:
        super().commit(request)
        self.tree.flush_pending_backups()

    def copies(self) -> Iterable[Copies]:
        size, noted, self.pool.noted = self.block_size, self.pool.noted, []
        for is_out, *slots in noted:
            sources, targets = ((each[::size] // size).tolist() for each in slots)
            yield Copies(is_out, sources, targets)


CONTENDER = HiCache
