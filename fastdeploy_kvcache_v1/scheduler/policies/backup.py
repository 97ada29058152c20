"""BackupPolicy: which runs get a host copy, and when. Users choose one with `--write-policy`."""

from __future__ import annotations

from collections.abc import Callable

from ...config import KVCacheConfig, WritePolicy

DECAY = 0.9
"""Per step: a rush of new prompts is remembered for some twenty steps."""


class BackupPolicy:
    """What a value of `config.WritePolicy` means.

    `Tiering` asks, finds room on the host, and copies; it passes over runs that have a host copy. A run for which there
    is no room gets no copy, which costs speed and nothing else.
    """

    weighs = False
    """A block is copied only if it is worth as much as what would have to leave the host for it."""

    def __init__(self, *, copied_after_hits: int | None = None, saves_at_eviction: bool = False) -> None:
        self.copied_after_hits = copied_after_hits
        """A run is copied once so many requests have hit it, or tried again at a later hit; with 0 as soon as its
        blocks are complete. None: never for its hits. `Run.hits` stops there: blocks with different counts cannot
        share a run, so counting further would make runs shorter.
        """
        self.saves_at_eviction = saves_at_eviction
        """A run that leaves the device without a host copy is copied first."""

    def blocks_ahead(self, num_evicted: int, num_device: int, num_host: int) -> int:
        """How many blocks, from the next to leave the device on, are to be copied before they must go. Asked once per
        step, in which `num_evicted` blocks have left it; the tiers have room for so many blocks now.
        """
        return 0


class Auto(BackupPolicy):
    """Write back, ahead of time, and only what is worth its place on the host.

    An eviction that has to copy first holds up the prompt that needs the slots, and its blocks cannot be found until
    the step has been taken. So as many blocks as left in the busiest step of late are kept copied, from the next to
    leave on. A block that is used again first was copied for nothing; there are few of them at that end of the order.

    A block that will hardly come back is not copied where it would push out a better one, if the host's eviction order
    can tell them apart.
    """

    weighs = True

    def __init__(self) -> None:
        super().__init__(saves_at_eviction=True)
        self._pace = 0.0
        """Blocks that leave in a step, at the busiest, as time goes by."""

    def blocks_ahead(self, num_evicted: int, num_device: int, num_host: int) -> int:
        self._pace = max(float(num_evicted), DECAY * self._pace)
        # Of a short host tier more would be missing than it is worth: they are in both tiers for a while.
        return min(int(self._pace), max(1, min(num_device // 8, num_host // 32)))


BACKUP_POLICIES: dict[WritePolicy, Callable[[KVCacheConfig], BackupPolicy]] = {
    WritePolicy.AUTO: lambda config: Auto(),
    WritePolicy.WRITE_THROUGH: lambda config: BackupPolicy(copied_after_hits=0),
    WritePolicy.WRITE_THROUGH_SELECTIVE: lambda config: BackupPolicy(copied_after_hits=config.write_through_threshold),
    WritePolicy.WRITE_BACK: lambda config: BackupPolicy(saves_at_eviction=True),
}
"""A new one is a line here, and a class above if it does something else."""
