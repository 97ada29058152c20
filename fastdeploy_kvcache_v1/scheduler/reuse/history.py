"""ReuseHistory: when the watched blocks of past prompts were used last, and how often; what that says about others.

It looks at requests, not at the cache: what it learns does not depend on what was evicted. It costs O(log n) for a
prompt of n blocks, and its memory is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ...metadata import BlockHash
from ..run import Run
from .ages import LiveAges
from .depths import last_watched
from .judge import Judge
from .rates import AGE_CLASSES, CLASSES, MOST_USES, NUM_CLASSES, ReuseRates, table
from .watched import IN_USE, WatchedBlocks

REQUESTS_PER_REFRESH = 64

ALL_EQUAL = table()
"""What blocks are worth while recency rules."""

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
        self._num_evictable = num_evictable
        self._num_blocks_seen = 0
        self.lru_age = 0
        """What was used less than so long ago, an LRU order would still hold."""
        self._watched = WatchedBlocks(most_blocks)
        self._worths = ALL_EQUAL

    def __len__(self) -> int:
        """Blocks that are watched."""
        return len(self._watched)

    @property
    def rules(self) -> bool:
        """Is what was learned trusted, rather than recency alone?"""
        return self._judge.trusts

    def worth(self, run: Run) -> float:
        """What keeping a block of `run` earns per unit of time; all are equal while recency rules."""
        return self._worths[run.kind][AGE_CLASSES[(self.now - run.last_use).bit_length()]]

    @property
    def ripening(self) -> Sequence[int]:
        """Classes whose youngest blocks may be worth less than older ones."""
        return self._rates.ripening if self._judge.trusts else ()

    def arrived(self, hashes: Sequence[BlockHash], num_cached: int) -> None:
        """A request is admitted that has these blocks; it finds `num_cached` of them."""
        now = self.now = self.now + 1
        self._num_blocks_seen += len(hashes)
        held_since = now - self.lru_age
        known = found_by_lru = 0
        for group in self._watched.use(hashes, len(hashes)):
            known, time = group.depth, group.time
            if time == IN_USE:
                found_by_lru = known
            else:
                if time > held_since:
                    found_by_lru = known
                self._rates.used_again(CLASSES[group.uses], now - time, group.num_blocks)
                self._ages.remove(time, CLASSES[group.uses], group.num_blocks)
                group.time = IN_USE
            if group.uses < MOST_USES:
                group.uses += 1
        self._judge.compare(known if known <= num_cached else last_watched(num_cached), found_by_lru)
        if not now % REQUESTS_PER_REFRESH:
            self._refresh()

    def ended(self, hashes: Sequence[BlockHash], num_cached: int) -> list[Stretch]:
        """A request has ended whose first `num_cached` blocks are cached: they count as used now. Returns the stretches
        of these blocks, the deepest first.
        """
        now, kind = self.now, -1
        weights, stretches = self._ages.young(now), list[Stretch]()
        for group in reversed(self._watched.use_all(hashes, num_cached)):
            if CLASSES[group.uses] != kind:
                kind = CLASSES[group.uses]
                stretches.append(Stretch(group.depth, kind))
            if group.time != IN_USE:  # another request that used them has ended before
                self._ages.remove(group.time, kind, group.num_blocks)
            weights[kind] += group.num_blocks
            group.time = now
        self._watched.make_room()
        return stretches

    def forget(self) -> None:
        """The cache was emptied. What was learned stays."""
        self._watched.forget()
        self._ages = LiveAges(NUM_CLASSES, self.now)

    def _refresh(self) -> None:
        for young, old, weights in self._ages.spans(self.now):
            self._rates.exposed((young + old) // 2, weights, REQUESTS_PER_REFRESH)
        self.lru_age = self._ages.age_of(self.now, self._num_evictable())
        if self.lru_age < self.now:
            self._judge.refresh()
        self._rates.refresh(DOUBT * self._num_blocks_seen / self.now, is_wanted=self._judge.trusts)
        self._worths = self._rates.worths if self._judge.trusts else ALL_EQUAL
