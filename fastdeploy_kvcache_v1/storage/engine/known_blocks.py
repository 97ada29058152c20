"""KnownBlocks: blocks that this server lately stored, loaded, or could not store."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from ...contract.messages import BlockHash

__all__ = ["KnownBlocks"]

MOST_KNOWN = 65_536
"""Hashes kept, the latest: some 10 MB."""


class KnownBlocks:
    """Contains the stored ones; the store may have deleted a block since. One thread adds; lookups are thread-safe."""

    def __init__(self) -> None:
        self._blocks = OrderedDict[object, bool]()  # a dict searches for its first key, past deleted ones
        """Whether it is stored."""

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: object) -> bool:
        return self._blocks.get(block, False)

    def lacks(self, block: BlockHash) -> bool:
        """Whether the block is known not to be stored."""
        return not self._blocks.get(block, True)

    def add(self, hashes: Sequence[BlockHash], *, are_stored: bool = True) -> None:
        for block in hashes:
            self._blocks.pop(block, None)
            self._blocks[block] = are_stored
        while len(self._blocks) > MOST_KNOWN:
            self._blocks.popitem(last=False)

    def deleted(self, hashes: Sequence[BlockHash]) -> None:
        """Those of `hashes` that it contains are not stored any more."""
        for block in hashes:
            if block in self:
                del self._blocks[block]

    def forget(self) -> None:
        self._blocks = OrderedDict()
