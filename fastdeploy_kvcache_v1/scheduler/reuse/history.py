"""ReuseHistory: learns from past prompts how soon blocks are used again, and so what keeping a block is worth.

It watches requests, not the cache, so evictions do not change what it learns. A prompt of n blocks costs O(log n).
Memory is bounded.
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
"""Worth of blocks while eviction falls back to recency."""

DOUBT = 0.5
"""Weight of the prior, in average requests: every class starts with the common rate of all classes, at each age."""


Stretch = tuple[int, int]
"""Consecutive blocks of a prompt that have one class: the depth of the last one in blocks from the start of the prompt,
and the class. It begins where the next stretch above ends. A plain tuple, because each request makes several.
"""


class ReuseHistory:
    """Learns from requests. Its time is the number of admitted requests.

    `most_watched` returns how many blocks may be watched; `num_evictable` returns how many blocks not in use the cache
    can hold. Both are called again, because the size of the cache may change.
    """

    def __init__(self, most_watched: Callable[[], int], num_evictable: Callable[[], int]) -> None:
        self.now = 0
        self._rates = ReuseRates()
        self._ages = LiveAges(NUM_CLASSES)
        self.judge = Judge()
        self._most_watched = most_watched
        self._num_evictable = num_evictable
        self._num_blocks_seen = 0
        self.lru_age = 0
        """Age up to which an LRU cache of this size would still hold a block."""
        self._watched = WatchedBlocks()
        self._worths = ALL_EQUAL
        self.ripening: Sequence[int] = ()
        """Classes whose youngest blocks may be worth less than older ones."""

    def __len__(self) -> int:
        """Number of watched blocks."""
        return len(self._watched)

    def worth(self, run: Run) -> float:
        """Return the value of keeping a block of `run` per unit of time. Equal for all while recency rules."""
        age = self.now - run.last_use
        return self._worths[run.use_class][AGE_CLASSES[(age * age).bit_length()]]

    def arrived(self, hashes: Sequence[BlockHash], num_cached: int) -> Sequence[Group]:
        """Record an admitted request with these blocks, `num_cached` of them hit. Returns `before` for `ended`."""
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
        """Record the end of a request: its first `num_cached` blocks, which are cached, count as used now. Returns
        their stretches, the deepest first. `before`: the result of `arrived`, if it was called.
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
        """Forget all watched blocks, because the cache was emptied. Learned rates stay."""
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
