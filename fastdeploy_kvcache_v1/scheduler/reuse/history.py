"""ReuseHistory: when the watched blocks of past prompts were used last, and how often; what that says about others.

It looks at requests, not at the cache: what it learns does not depend on what was evicted. It costs O(log n) for a
prompt of n blocks, and its memory is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...contract.messages import BlockHash
from ..run import Run
from .ages import LiveAges
from .judge import Judge
from .rates import AGE_CLASSES, CLASSES, MOST_USES, NUM_CLASSES, ReuseRates, table
from .watched import IN_USE, Group, WatchedBlocks, last_watched

REQUESTS_PER_REFRESH = 64

ALL_EQUAL = table()
"""What blocks are worth while recency rules."""

DOUBT = 0.5
"""Evidence of so many average requests is shared by all classes of blocks before one is told from the others, at each
of the ages that are told apart.
"""


Stretch = tuple[int, int]
"""Blocks of a prompt that are of one class, up to the next stretch above: how many there are from the start of the
prompt to its last one, and the class. A plain tuple, because several are made for each request.
"""


class ReuseHistory:
    """Time is the number of requests that were admitted."""

    def __init__(self, most_watched: Callable[[], int], num_evictable: Callable[[], int]) -> None:
        """Both are asked again and again, since the size of the cache may change: how many blocks may be watched, and
        how many a cache of this size can hold beside those in use.
        """
        self.now = 0
        self._rates = ReuseRates()
        self._ages = LiveAges(NUM_CLASSES)
        self.judge = Judge()
        self._most_watched = most_watched
        self._num_evictable = num_evictable
        self._num_blocks_seen = 0
        self.lru_age = 0
        """What was used less than so long ago, an LRU order would still hold."""
        self._watched = WatchedBlocks()
        self._worths = ALL_EQUAL
        self.ripening: Sequence[int] = ()
        """Classes whose youngest blocks may be worth less than older ones."""

    def __len__(self) -> int:
        """Blocks that are watched."""
        return len(self._watched)

    def worth(self, run: Run) -> float:
        """What keeping a block of `run` earns per unit of time; all are equal while recency rules."""
        age = self.now - run.last_use
        return self._worths[run.use_class][AGE_CLASSES[(age * age).bit_length()]]

    def arrived(self, hashes: Sequence[BlockHash], num_cached: int) -> Sequence[Group]:
        """A request is admitted that has these blocks; it finds `num_cached` of them. Returns what `ended` takes."""
        now = self.now = self.now + 1
        self._num_blocks_seen += len(hashes)
        held_since = now - self.lru_age
        known = found_by_lru = 0
        groups = self._watched.use(hashes, len(hashes))
        for group in groups:
            known, time, uses = group.depth, group.time, group.uses
            if time == IN_USE:
                found_by_lru = known
            else:
                if time > held_since:
                    found_by_lru = known
                use_class, num_blocks = CLASSES[uses], group.num_blocks
                self._rates.used_again(use_class, now - time, num_blocks)
                self._ages.remove(time, use_class, num_blocks)
                group.time = IN_USE
            if uses < MOST_USES:
                group.uses = uses + 1
        self.judge.compare(known if known <= num_cached else last_watched(num_cached), found_by_lru)
        if not now % REQUESTS_PER_REFRESH:
            self._refresh()
        return groups

    def ended(self, hashes: Sequence[BlockHash], num_cached: int, before: Sequence[Group] = ()) -> list[Stretch]:
        """A request has ended whose first `num_cached` blocks are cached: they count as used now. Returns the stretches
        of these blocks, the deepest first. `before`: what `arrived` returned, if it arrived.
        """
        now, last_class = self.now, -1
        weights, stretches = self._ages.young(now), list[Stretch]()
        for group in reversed(self._watched.use_all(hashes, num_cached, before)):
            use_class, num_blocks = CLASSES[group.uses], group.num_blocks
            if use_class != last_class:
                stretches.append((group.depth, use_class))
                last_class = use_class
            if group.time != IN_USE:  # another request that used them has ended before
                self._ages.remove(group.time, use_class, num_blocks)
            weights[use_class] += num_blocks
            group.time = now
        self._watched.make_room(self._most_watched())
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
            self.judge.refresh()
        self._worths, self.ripening = ALL_EQUAL, ()
        if self.judge.trusts:
            self._worths, self.ripening = self._rates.learned(DOUBT * self._num_blocks_seen / self.now)
        self._rates.fade()
