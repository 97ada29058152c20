"""KnownBlocks: blocks that this server has lately stored or loaded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from ...contract.messages import BlockHash

__all__ = ["KnownBlocks"]

MOST_KNOWN = 65_536
"""Hashes kept, the latest: some 10 MB."""


class KnownBlocks:
    """For debug pages only: the store may have deleted a block since. One thread adds; lookups are thread-safe."""

    def __init__(self) -> None:
        self._blocks = OrderedDict[BlockHash, None]()  # a dict searches for its first key, past deleted ones

    def __contains__(self, block: object) -> bool:
        return block in self._blocks

    def add(self, hashes: Sequence[BlockHash]) -> None:
        for block in hashes:
            self._blocks.pop(block, None)
            self._blocks[block] = None
        while len(self._blocks) > MOST_KNOWN:
            self._blocks.popitem(last=False)

    def forget(self) -> None:
        self._blocks = OrderedDict()
