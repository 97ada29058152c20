"""Auto: write back, ahead of time, and only what is worth its place on the host."""

from __future__ import annotations

from ...config import KVCacheConfig
from .write_back import WriteBack

DECAY = 0.9
"""Per step: a rush of new prompts is remembered for some twenty steps."""


class Auto(WriteBack):
    """An eviction that has to copy first holds up the prompt that needs the slots, and its blocks cannot be found until
    the step has been taken. So as many blocks as left in the busiest step of late are kept copied, from the next to
    leave on. A block that is used again first was copied for nothing; there are few of them at that end of the order.

    A block that will hardly come back is not copied where it would push out a better one, if the host's eviction policy
    can tell them apart.
    """

    weighs = True

    def __init__(self, config: KVCacheConfig) -> None:
        self._pace = 0.0
        """Blocks that leave in a step, at the busiest, as time goes by."""

    def blocks_ahead(self, num_evicted: int, num_device: int, num_host: int) -> int:
        self._pace = max(float(num_evicted), DECAY * self._pace)
        # Of a short host tier more would be missing than it is worth: they are in both tiers for a while.
        return min(int(self._pace), max(1, min(num_device // 8, num_host // 32)))
