"""TrafficLog: remembers the latest requests, so that other sizes of the tiers can be tried on them.

Of a prompt it has each `rate`-th block, from an offset that its first block decides. So a block is sampled in every
prompt or in none, which keeps reuse distances, divided by the rate (as SHARDS does by hash: Waldspurger et al., FAST
2015). A run of blocks has its share of them, which a choice by hash would leave to chance.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from ...contract.messages import BlockHash
from ..request_state import RequestState

MOST_REQUESTS = 1 << 14
"""Requests of the log at most, 5 MB."""
MOST_BLOCKS = 1 << 18
"""Sampled blocks of the log at most, 20 MB."""

UNSAMPLED = 1 << 10
"""Blocks of a cache that is not sampled. A larger one is sampled by a power of two, up to `USUAL_RATE`."""
USUAL_RATE = 16
TURNOVERS = 8
"""Times that the log could fill the cache: the rate of a very large cache is higher."""

NAME_BYTES = 8
"""A block is named by Python's hash of its hash."""


class Row(NamedTuple):
    """A request that has ended."""

    started: int
    """Step of its admission. The next four are the steps that were open then, 0 for never."""
    computed: int
    """Step after the last block of its prompt, or after its admission if all of them were hits."""
    grown: int
    """Step after the last block of its output."""
    ended: int
    started_s: float
    ended_s: float
    reads: bool
    writes: bool
    is_resumed: bool
    calls_tool: bool
    return_in_s: float | None
    session: bytes
    tenant: bytes
    """The last three as in a `SessionHint`."""
    num_tokens: int
    """Of the prompt, all blocks."""
    num_hit: int
    """Of these, all blocks."""
    num_findable: int
    """Sampled blocks that could be hits."""
    num_prompt: int
    """Sampled blocks of the prompt."""
    names: bytes
    """Of the sampled blocks."""


class Traffic(msgspec.Struct, frozen=True):
    """A log at one moment."""

    rate: int
    is_whole: bool
    """The log has all requests since the cache was empty."""
    rows: list[Row]
    """In the order of their ends."""


class TrafficLog:
    """Costs a request no more than a slice of its hashes. Not thread-safe."""

    def __init__(self, clock: Callable[[], float], block_size: int, num_blocks: int) -> None:
        self._clock = clock
        self._block_size = block_size
        self.restart(num_blocks)

    def restart(self, num_blocks: int, *, is_empty: bool = True) -> None:
        """Forget all: the cache can hold `num_blocks` from now on. `is_empty`: it holds none now."""
        self._rate = rate_of(num_blocks)
        self._rows: deque[tuple[Any, ...]] = deque()
        self._num_blocks = 0
        self._is_whole = is_empty
        self._begun_s = self._clock()

    def started(self, request: RequestState, now: float) -> None:
        """Take note of an admitted request, whose hits are counted now."""
        request.start = request.step, now, request.num_cached

    def ended(self, request: RequestState, step: int) -> None:
        """Log a request that `started`. `step` is open."""
        assert request.start is not None
        started, started_s, num_hit = request.start
        if started_s < self._begun_s:
            return
        sequence, size, rate, limit = request.sequence, self._block_size, self._rate, request.limit
        computed = request.computed
        if not computed and num_hit >= limit > 0:  # a smaller cache would compute what was found
            computed = started + 1
        num_tokens, num_cached, hashes = request.num_query_tokens, request.num_cached, sequence.hashes
        num_blocks = limit if limit > num_cached else num_cached
        blocks: Sequence[BlockHash] = ()
        before = rate - 1
        if num_blocks:
            offset = hashes[0][0] % rate
            before -= offset
            blocks = hashes[offset:num_blocks:rate]
        num_prompt = num_tokens // size
        if num_prompt > num_blocks:
            num_prompt = num_blocks
        name, tenant, return_in_s, calls_tool = sequence.session
        self._rows.append((
            started, computed, request.grown, step, started_s, self._clock(),
            *sequence.access, request.resumed, calls_tool, return_in_s, name, tenant,
            num_tokens, num_hit * size, (limit + before) // rate, (num_prompt + before) // rate, blocks,
        ))  # fmt: skip
        self._num_blocks += len(blocks)
        if len(self._rows) > MOST_REQUESTS or self._num_blocks > MOST_BLOCKS:
            self._num_blocks -= len(self._rows.popleft()[-1])
            self._is_whole = False

    def copied(self) -> tuple[int, bool, list[tuple[Any, ...]]]:
        """Return the fields of a `Traffic`, its rows as `row_of` takes them. Running requests are not part of it."""
        return self._rate, self._is_whole, list(self._rows)


def row_of(fields: tuple[Any, ...]) -> Row:
    """Name the blocks of a copied row."""
    return Row._make((*fields[:-1], array("q", map(hash, fields[-1])).tobytes()))


def rate_of(num_blocks: int) -> int:
    """Return how many blocks a sampled block stands for, in a cache that can hold `num_blocks`."""
    rate = 1
    while (rate < USUAL_RATE and num_blocks > rate * UNSAMPLED) or num_blocks * TURNOVERS > rate * MOST_BLOCKS:
        rate *= 2
    return rate
