"""The clairvoyant bound: the hits of one tier that knows all later requests.

Belady's rule evicts the block that is needed last (L. A. Belady, A study of replacement algorithms for a
virtual-storage computer, IBM Systems Journal 5(2), 1966). It is optimal for blocks of equal cost (R. L. Mattson et al.,
Evaluation techniques for storage hierarchies, IBM Systems Journal 9(2), 1970). Prefixes cost it nothing: a request that
uses a block uses all blocks before it, so evicting the deepest of equals never leaves a hole.

Each request ends here before the next one begins, and may leave no block in the tier. Open requests take room and share
no blocks of one step, so any window has fewer hits, and the bound holds for all.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...contract.messages import BlockHash
from .hashes import TraceHasher
from .trace import TraceRequest


class Span(NamedTuple):
    """Adjacent blocks of a prompt with the same next user."""

    next_use: int
    """Index of that request."""
    length: int
    num_made: int
    """Last blocks of the span that this request cannot hit: the block of its last token, and output blocks."""


class Clairvoyant:
    """A stream of requests, prepared for any capacity. Not thread-safe.

    O(blocks) to make, with an entry per distinct block meanwhile. Keeps some spans per request.
    """

    def __init__(self, requests: Sequence[TraceRequest], block_size: int, *, outputs: bool = False) -> None:
        """`requests` in the order of admission; with `outputs` their outputs are cached too."""
        hasher = TraceHasher(block_size)
        next_uses: dict[BlockHash, int] = {}
        self._paths: list[list[Span]] = [[]] * len(requests)
        """In prompt order, without blocks that are never hit again."""
        for index in range(len(requests) - 1, -1, -1):
            request = requests[index]
            hashes = hasher.prompt_hashes(request)
            if outputs and request.output_hash_ids:
                # The last output token is sampled and not computed.
                num_made = (request.input_length + max(1, request.output_length) - 1) // block_size - len(hashes)
                hashes += hasher.output_hashes(request)[: max(0, num_made)]
            # The last prompt token is always computed, so its block is no hit.
            num_hittable = (request.input_length - 1) // block_size
            self._paths[index] = _spans(next_uses, hashes, num_hittable)
            next_uses.update(dict.fromkeys(hashes[:num_hittable], index))

    def hits(self, capacity: int) -> int:
        """Blocks hit by one tier of `capacity` blocks. O(spans * log requests)."""
        # The cached blocks that request t needs next are adjacent on t's path, from the end of the blocks that are
        # needed earlier. So their number identifies them.
        cached = array("q", bytes(8 * len(self._paths)))
        farthest: list[int] = []  # heap of -t for each t with blocks; ended requests are at its end
        num_cached = num_hits = 0
        for index, spans in enumerate(self._paths):
            num_hits += cached[index]
            num_cached -= cached[index]
            cached[index] = 0
            for next_use, length, num_made in spans:
                length -= min(num_made, cached[next_use])  # no hit, but cached already
                if length and not cached[next_use]:
                    heapq.heappush(farthest, -next_use)
                cached[next_use] += length
                num_cached += length
            while num_cached > capacity:
                last = -farthest[0]
                dropped = min(cached[last], num_cached - capacity)
                cached[last] -= dropped
                num_cached -= dropped
                if not cached[last]:
                    heapq.heappop(farthest)
        return num_hits


def _spans(next_uses: Mapping[BlockHash, int], hashes: Sequence[BlockHash], num_hittable: int) -> list[Span]:
    spans: list[Span] = []
    for index, block in enumerate(hashes):
        next_use = next_uses.get(block)
        if next_use is None:
            break  # nor are the blocks after it
        is_made = index >= num_hittable
        if spans and spans[-1].next_use == next_use:
            spans[-1] = Span(next_use, spans[-1].length + 1, spans[-1].num_made + is_made)
        else:
            spans.append(Span(next_use, 1, int(is_made)))
    return spans
