"""OpenPrefills: what the batch that is being put together computes, so that it computes no block twice.

A request that would compute blocks which the batch computes for another one waits, and finds them in the cache when
the next batch is put together. It never waits for more than the batch, so there is nothing to undo: if the batch is
lost, or the other request aborted or preempted, the next batch does not compute these blocks, and nobody waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from ..contract.messages import BlockHash, BlockHashes

MOST_LOOKED_AT = 32
"""Requests of the line that are asked whether they would wait for the same blocks."""


class OpenPrefills:
    """Of one batch: `begin` starts the next one. Not thread-safe.

    A request waits if together the waiting line need not compute `worth_tokens` tokens: a request that waits needs one
    batch more, and a batch costs something whatever is in it. 0: none ever waits.
    """

    def __init__(self, block_size: int, worth_tokens: int) -> None:
        self._block_size = block_size
        self._worth_tokens = worth_tokens
        self._blocks: set[BlockHash] = set()
        self._by_request: dict[str, Sequence[BlockHash]] = {}

    def __bool__(self) -> bool:
        return bool(self._blocks)

    def begin(self) -> None:
        """The batch is sent, or given up: the next one computes nothing so far."""
        self._blocks.clear()
        self._by_request.clear()

    def compute(self, request_id: str, hashes: Sequence[BlockHash]) -> None:
        """The batch computes these blocks for a request, and they can be matched after it."""
        if self._worth_tokens and hashes:
            self._by_request[request_id] = hashes
            self._blocks.update(hashes)

    def give_up(self, request_id: str) -> None:
        """The request leaves the batch. A block that another one computes as well may be forgotten with it: safe."""
        self._blocks.difference_update(self._by_request.pop(request_id, ()))

    def to_wait_for(self, sequence: BlockHashes, num_cached: int, line: Iterable[BlockHashes]) -> int:
        """How many blocks right behind the `num_cached` cached ones of a request it should wait for; 0: start now.

        `line`: the other requests that wait. O(blocks shared), and O(`MOST_LOOKED_AT`) where these are few.
        """
        num_shared = self._num_shared(sequence, num_cached)
        missing = self._worth_tokens - num_shared * self._block_size
        if not num_shared or missing <= 0:
            return num_shared
        for other in islice(line, MOST_LOOKED_AT):
            missing -= self._num_shared(other, num_cached) * self._block_size
            if missing <= 0:
                return num_shared
        return 0

    def _num_shared(self, sequence: BlockHashes, first: int) -> int:
        """Blocks from `first` on. The last token of a request is never cached: its logits are wanted."""
        if not sequence.access.reads:
            return 0
        hashes, end = sequence.hashes, min(len(sequence.hashes), (sequence.num_tokens - 1) // self._block_size)
        index = first
        while index < end and hashes[index] in self._blocks:
            index += 1
        return index - first
