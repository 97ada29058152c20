"""SGLang's tree and its slots alone, without its table of rows: the least of SGLang that finds and frees blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang_tree import SGLang


@dataclass
class Request:
    tokens: Any
    matched: int = 0
    node: Any = None
    lock: Any = None
    slots: Any = None


class SGLangCore(SGLang):
    def arrive(self, number: int, tokens: list[int]) -> Request:
        return Request(super().arrive(number, tokens).origin_input_ids)

    def start(self, request: Request) -> None:
        tree, tokens, size = self.tree, len(request.tokens), self.block_size
        match = tree.match_prefix(MatchPrefixParams(key=RadixKey(request.tokens, limit=tokens - 1)))
        request.matched, node = match.device_prefix_len, match.last_device_node
        request.lock = tree.lock(node)
        missing = -(-tokens // size) * size - request.matched
        evict_from_tree_cache(tree, missing)
        new = self.slots.alloc(missing)
        assert new is not None, "the device tier must hold the window"
        request.slots = torch.cat((tree.path_device_indices(node), new))

    def commit(self, request: Request) -> None:
        size = self.block_size
        full = len(request.tokens) // size * size
        key = RadixKey(request.tokens).page_aligned(size)
        given = InsertParams(key=key, value=request.slots[:full], prev_prefix_len=request.matched)
        inserted = self.tree.insert(given)
        lock = self.tree.lock(inserted.last_device_node)
        self.tree.unlock(request.lock)
        request.lock = lock

    def finish(self, request: Request) -> None:
        full = len(request.tokens) // self.block_size * self.block_size
        self.slots.free_segment(request.slots[full:], start_pos=full)
        self.tree.unlock(request.lock)

    def table(self, request: Request) -> tuple[list[int], int]:
        return (request.slots[:: self.block_size] // self.block_size).tolist(), request.matched // self.block_size


CONTENDER = SGLangCore
