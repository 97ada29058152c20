"""The least that a prefix cache can do: one tier, LRU, one dict and one OrderedDict, no checks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class NaiveCache:
    """`blocks` maps a hash to its slot, `idle` holds unused hashes, least recently used first."""

    def __init__(self, num_blocks: int) -> None:
        self.free = list(range(num_blocks))
        self.users = [0] * num_blocks
        self.blocks: dict[bytes, int] = {}
        self.idle: OrderedDict[bytes, None] = OrderedDict()
        self.tables: dict[int, tuple[Sequence[bytes], list[int]]] = {}

    def start(self, request: int, hashes: Sequence[bytes], num_tokens: int, block_size: int) -> None:
        """Match and allocate."""
        blocks, idle, users, free = self.blocks, self.idle, self.users, self.free
        table = []
        for block in hashes[: (num_tokens - 1) // block_size]:
            slot = blocks.get(block)
            if slot is None:
                break
            if not users[slot]:
                del idle[block]
            users[slot] += 1
            table.append(slot)
        for _ in range(-(-num_tokens // block_size) - len(table)):
            slot = free.pop() if free else blocks.pop(idle.popitem(last=False)[0])
            users[slot] = 1
            table.append(slot)
        self.tables[request] = hashes, table

    def commit(self, request: int) -> None:
        blocks = self.blocks
        for block, slot in zip(*self.tables[request], strict=False):
            if block not in blocks:
                blocks[block] = slot

    def finish(self, request: int) -> None:
        blocks, idle, users = self.blocks, self.idle, self.users
        hashes, table = self.tables.pop(request)
        for index in range(len(table) - 1, -1, -1):
            slot = table[index]
            users[slot] -= 1
            if not users[slot]:
                if index < len(hashes) and blocks.get(hashes[index]) == slot:
                    idle[hashes[index]] = None
                else:
                    self.free.append(slot)
