"""The clairvoyant bound: how many blocks one tier could hit that knows all requests to come.

Belady's rule keeps what is needed next (L. A. Belady, A study of replacement algorithms for a virtual-storage computer,
IBM Systems Journal 5(2), 1966; for blocks that are all alike it is optimal: R. L. Mattson et al., Evaluation
techniques for storage hierarchies, IBM Systems Journal 9(2), 1970). Prefix closure costs it nothing: a request that
uses a block uses the blocks before it, so these are needed no later. Evicting the block that is needed last, of equals
the deepest, never leaves a hole.

The window of open requests is ignored: each request is over before the next one begins, and may pass through a tier
that keeps nothing of it. Open requests only take room, and share no blocks computed in the same step, so with any
window fewer hits are possible: the bound holds for all.
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
    """Neighbouring blocks of a prompt that the same later request hits next."""

    next_use: int
    """Index of that request in the stream."""
    length: int
    num_made: int
    """Blocks of it, the last ones, that this request cannot hit: that of its last token, and its output's."""


class Clairvoyant:
    """What follows from a stream of requests before any capacity is chosen. Not thread-safe.

    O(blocks) to make, with an entry in memory per distinct block meanwhile; some spans per request are kept.
    """

    def __init__(self, requests: Sequence[TraceRequest], block_size: int, *, outputs: bool = False) -> None:
        """`requests` in the order in which they are admitted; with `outputs` their outputs are cached, too."""
        hasher = TraceHasher(block_size)
        next_uses: dict[BlockHash, int] = {}
        self._paths: list[list[Span]] = [[]] * len(requests)
        """In prompt order; blocks that are never hit again are in no span."""
        for index in range(len(requests) - 1, -1, -1):
            request = requests[index]
            hashes = hasher.prompt_hashes(request)
            if outputs and request.output_hash_ids:
                # The last token of an output is sampled and not computed.
                num_made = (request.input_length + max(1, request.output_length) - 1) // block_size - len(hashes)
                hashes += hasher.output_hashes(request)[: max(0, num_made)]
            # The last token of a prompt is always computed, so its block is no hit.
            num_hittable = (request.input_length - 1) // block_size
            self._paths[index] = _spans(next_uses, hashes, num_hittable)
            next_uses.update(dict.fromkeys(hashes[:num_hittable], index))

    def hits(self, capacity: int) -> int:
        """Blocks hit by one tier of `capacity` blocks. O(spans * log requests)."""
        # A block needed next by request t is on t's path, and those of t that are cached are neighbours, from where
        # t's path leaves what is needed earlier: their number says which ones they are.
        cached = array("q", bytes(8 * len(self._paths)))
        farthest: list[int] = []  # heap of -t, for every t with blocks; requests that are over lie at its end
        num_cached = num_hits = 0
        for index, spans in enumerate(self._paths):
            num_hits += cached[index]
            num_cached -= cached[index]
            cached[index] = 0
            for next_use, length, num_made in spans:
                length -= min(num_made, cached[next_use])  # these were no hit, and are there all the same
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
            break  # nor is what comes after it
        is_made = index >= num_hittable
        if spans and spans[-1].next_use == next_use:
            spans[-1] = Span(next_use, spans[-1].length + 1, spans[-1].num_made + is_made)
        else:
            spans.append(Span(next_use, 1, int(is_made)))
    return spans
