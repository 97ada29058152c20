"""ReuseHistory: when the watched blocks of past prompts were used last, and how often; what that says about others.

It looks at requests, not at the cache: what it learns does not depend on what was evicted. It costs O(log n) for a
prompt of n blocks, and its memory is bounded.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ...metadata import BlockHash
from ..run import Run
from .ages import LiveAges
from .depths import DEPTHS, WIDTHS
from .judge import Judge
from .rates import CLASSES, MOST_USES, NUM_CLASSES, ReuseRates

REQUESTS_PER_REFRESH = 64

IN_USE = -1
"""In place of a time: a running request uses the block, so no eviction can take it."""

UNKNOWN = (0, IN_USE)

DOUBT = 2.0
"""Evidence of so many average requests is shared by all classes of blocks before one is told from the others."""


class Stretch(NamedTuple):
    """Blocks of a prompt that are of one class, up to the next stretch above."""

    end: int
    """Blocks from the start of the prompt to its last one."""
    kind: int


class ReuseHistory:
    """Time is the number of requests that were admitted. Not thread-safe: the manager's lock covers it."""

    def __init__(self, most_blocks: int, num_evictable: Callable[[], int]) -> None:
        """`num_evictable`: how many blocks a cache of this size can hold beside those in use."""
        self.now = 0
        self._rates = ReuseRates()
        self._ages = LiveAges(NUM_CLASSES)
        self._judge = Judge()
        self._most_blocks = most_blocks
        self._num_evictable = num_evictable
        self._num_blocks_seen = 0
        self._lru_age = 0
        """What was used less than so long ago, an LRU order would still hold."""
        self._watched: dict[BlockHash, tuple[int, int]] = {}
        """Later requests that found it computed before, and time of the last use or `IN_USE`. Blocks that were used
        alike share their entry.
        """
        self._watched_before: dict[BlockHash, tuple[int, int]] = {}
        """Of the generation before: what is used again moves to this one, the rest is forgotten with it."""

    def __len__(self) -> int:
        """Blocks that are watched."""
        return len(self._watched) + len(self._watched_before)

    @property
    def rules(self) -> bool:
        """Is what was learned trusted, rather than recency alone?"""
        return self._judge.trusts

    def worth(self, run: Run) -> float:
        """What keeping a block of `run` earns per unit of time; all are equal while recency rules."""
        return self._rates.worth(run.kind, self.now - run.last_use) if self._judge.trusts else 0.0

    @property
    def ripening(self) -> Sequence[int]:
        """Classes whose youngest blocks may be worth less than older ones."""
        return self._rates.ripening if self._judge.trusts else ()

    def arrived(self, hashes: Sequence[BlockHash], num_cached: int) -> None:
        """A request is admitted that has these blocks; it finds `num_cached` of them."""
        self.now += 1
        count = len(hashes)
        self._num_blocks_seen += count
        watched, before, held_since = self._watched, self._watched_before, self.now - self._lru_age
        found = found_by_lru = above = begin = 0
        group = using = UNKNOWN
        for depth in DEPTHS:
            if depth > count:
                break
            block = hashes[depth - 1]
            seen = watched.get(block) or before.get(block)
            if seen is None:
                break
            if seen is not group:
                self._used_again(group, above - begin)
                group, using, begin = seen, (min(seen[0] + 1, MOST_USES), IN_USE), above
            watched[block] = using
            if seen[1] == IN_USE or seen[1] > held_since:
                found_by_lru = depth
            if depth <= num_cached:
                found = depth
            above = depth
        self._used_again(group, above - begin)
        self._judge.compare(found, found_by_lru)
        if not self.now % REQUESTS_PER_REFRESH:
            self._refresh()

    def ended(self, hashes: Sequence[BlockHash], num_cached: int) -> list[Stretch]:
        """A request has ended whose first `num_cached` blocks are cached: they count as used now. Returns the stretches
        of these blocks, the deepest first.
        """
        watched, before = self._watched, self._watched_before
        group: tuple[int, int] | None = None
        used, width = UNKNOWN, 0
        stretches: list[Stretch] = []
        for index in range(bisect_right(DEPTHS, num_cached) - 1, -1, -1):
            depth = DEPTHS[index]
            block = hashes[depth - 1]
            seen = watched.get(block) or before.get(block, UNKNOWN)
            if seen is not group:
                self._used(group, width)
                group, used, width = seen, (seen[0], self.now), 0
                if not stretches or stretches[-1].kind != CLASSES[seen[0]]:
                    stretches.append(Stretch(depth, CLASSES[seen[0]]))
            watched[block] = used
            width += WIDTHS[index]
        self._used(group, width)
        if len(watched) > self._most_blocks // 2:
            self._watched, self._watched_before = {}, watched
        return stretches

    def forget(self) -> None:
        """The cache was emptied. What was learned stays."""
        self._watched, self._watched_before = {}, {}
        self._ages = LiveAges(NUM_CLASSES, self.now)

    def _used_again(self, group: tuple[int, int], num_blocks: int) -> None:
        """Blocks whose entry was `group` are in use now."""
        uses, time = group
        if time != IN_USE:
            self._rates.used_again(CLASSES[uses], self.now - time, num_blocks)
            self._ages.remove(time, CLASSES[uses], num_blocks)

    def _used(self, group: tuple[int, int] | None, num_blocks: int) -> None:
        """Blocks whose entry was `group` may be used again from now on."""
        if group is None:
            return
        uses, time = group
        if time != IN_USE:  # another request that used them has ended before
            self._ages.remove(time, CLASSES[uses], num_blocks)
        self._ages.add(self.now, CLASSES[uses], num_blocks)

    def _refresh(self) -> None:
        for young, old, weights in self._ages.spans(self.now):
            self._rates.exposed((young + old) // 2, weights, REQUESTS_PER_REFRESH)
        self._rates.refresh(DOUBT * self._num_blocks_seen / self.now)
        self._lru_age = self._ages.age_of(self.now, self._num_evictable())
        if self._lru_age < self.now:
            self._judge.refresh()
