"""SGLang's prefix caches with its paged allocator: `unified rust` and `unified python` are the cores of its default,
`radix` is the plain Python tree.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import stubs
from contender import Contender

stubs.install("sgl_kernel", "flashinfer", "torchao", "torchaudio")

import torch  # noqa: E402
from sglang.srt.managers.schedule_batch import ReqKvInfo  # noqa: E402
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.common import evict_from_tree_cache  # noqa: E402
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey  # noqa: E402
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType  # noqa: E402
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # noqa: E402
from sglang.version import __version__  # noqa: E402

LONGEST = 1 << 18


@dataclass
class Request:
    """The fields of SGLang's request that its caches read."""

    rid: str
    origin_input_ids: array[int]
    kv: Any
    full_untruncated_fill_ids: array[int] = field(init=False)
    extra_key = cache_salt = session_id = session = kv_rotation_base = lock = last_node = None
    priority = prefix_len = swa_host_hit_length = mamba_host_hit_length = 0
    has_ended = False

    def __post_init__(self) -> None:
        self.full_untruncated_fill_ids = self.origin_input_ids

    def finished(self) -> bool:
        return self.has_ended


class SGLang(Contender):
    version = __version__

    def __init__(self, device: int, host: int, block_size: int, kind: str) -> None:
        assert not host, "sglang_host.py has the host tier"
        torch.set_num_threads(1)
        self.block_size = block_size
        self.rows = ReqToTokenPool(64, LONGEST, "cpu", False)
        kv = SimpleNamespace(size=device * block_size)
        self.slots = PagedTokenToKVPoolAllocator(device * block_size, block_size, torch.bfloat16, "cpu", kv, False)
        name, _, core = kind.partition(" ")
        params = CacheInitParams(
            disable=False, req_to_token_pool=self.rows, token_to_kv_pool_allocator=self.slots, page_size=block_size,
            tree_components=(ComponentType.FULL,), tree_core_backend=core or None,
        )  # fmt: skip
        self.tree = RadixCache(params) if name == "radix" else UnifiedRadixCache(params)
        if core == "rust":  # SGLang falls back to Python where the core does not fit the machine
            assert "rust" in type(self.tree.tree_core).__module__, "SGLang chose its Python core"

    def arrive(self, number: int, tokens: list[int]) -> Request:
        return Request(str(number), array("q", tokens), ReqKvInfo())

    def match(self, request: Request) -> Any:
        key = RadixKey(request.origin_input_ids, limit=len(request.origin_input_ids) - 1)
        match = self.tree.match_prefix(MatchPrefixParams(key=key, req=request))
        request.prefix_len = request.kv.cache_protected_len = match.device_prefix_len
        request.last_node = match.last_device_node
        return match

    def start(self, request: Request) -> None:
        tree, tokens, size = self.tree, len(request.origin_input_ids), self.block_size
        self.match(request)
        request.lock = tree.lock(request.last_node)
        missing = -(-tokens // size) * size - request.prefix_len
        evict_from_tree_cache(tree, missing)
        new = self.slots.alloc(missing)
        assert new is not None, "the device tier must hold the window"
        (row,) = self.rows.alloc([request])
        self.rows.write((row, slice(0, request.prefix_len)), tree.path_device_indices(request.last_node))
        self.rows.write((row, slice(request.prefix_len, request.prefix_len + missing)), new)
        request.kv.kv_allocated_len = request.kv.kv_committed_len = tokens

    def commit(self, request: Request) -> None:
        request.has_ended = True  # one sampled token: its only insertion is the last one
        self.tree.checkpoint(request, up_to=len(request.origin_input_ids))

    def finish(self, request: Request) -> None:
        tree, tokens = self.tree, len(request.origin_input_ids)
        tree.free_kv_row(request.kv, [(request.kv.cache_protected_len, tokens)])
        tree.unlock(request.lock)
        tree.on_release(request, checkpointed=True)
        self.rows.free(request)
        request.kv.mark_kv_released()

    def table(self, request: Request) -> tuple[list[int], int]:
        row = self.rows.req_to_token[request.kv.req_pool_idx, : len(request.origin_input_ids) : self.block_size]
        return (row // self.block_size).tolist(), request.prefix_len // self.block_size

    def cached_blocks(self) -> int:
        return int(self.tree.evictable_size()) // self.block_size


CONTENDER = SGLang
