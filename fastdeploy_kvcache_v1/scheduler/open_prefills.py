"""OpenPrefills: the blocks that the batch being built computes, so that it computes no block twice.

A request waits if the batch computes its next blocks for another request; it hits them when the next batch is built.
It waits for one batch only, so nothing needs to be undone. If the batch is lost, or the other request is aborted or
preempted, the request just computes the blocks in the next batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from ..contract.messages import BlockHash, BlockHashes

MOST_LOOKED_AT = 32
"""Waiting requests that are checked for the same blocks."""


class OpenPrefills:
    """Covers one batch: `begin` starts the next one. Not thread-safe.

    A request waits if all waiting requests together save at least `worth_tokens` tokens by it: waiting takes one more
    batch, and a batch has a fixed cost. With 0 no request ever waits.
    """

    def __init__(self, block_size: int, worth_tokens: int) -> None:
        self._block_size = block_size
        self._worth_tokens = worth_tokens
        self._blocks: set[BlockHash] = set()
        self._by_request: dict[str, Sequence[BlockHash]] = {}

    def __bool__(self) -> bool:
        return bool(self._blocks)

    def begin(self) -> None:
        """Start a new batch: the last one was sent or dropped."""
        self._blocks.clear()
        self._by_request.clear()

    def compute(self, request_id: str, hashes: Sequence[BlockHash]) -> None:
        """Record that the batch computes the blocks `hashes` for a request, so that they can be matched after it."""
        if self._worth_tokens and hashes:
            self._by_request[request_id] = hashes
            self._blocks.update(hashes)

    def give_up(self, request_id: str) -> None:
        """Remove a request from the batch, with all its blocks, even those that another request computes too."""
        self._blocks.difference_update(self._by_request.pop(request_id, ()))

    def to_wait_for(self, sequence: BlockHashes, num_cached: int, line: Iterable[BlockHashes]) -> int:
        """Return how many blocks behind its `num_cached` cached ones a request should wait for; 0: start now.

        `line`: the other waiting requests. O(shared blocks), plus O(`MOST_LOOKED_AT`) if these are few.
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
        """Count blocks from `first` on that the batch computes. The last token is always computed, for its logits."""
        if not sequence.access.reads:
            return 0
        hashes, end = sequence.hashes, min(len(sequence.hashes), (sequence.num_tokens - 1) // self._block_size)
        index = first
        while index < end and hashes[index] in self._blocks:
            index += 1
        return index - first
