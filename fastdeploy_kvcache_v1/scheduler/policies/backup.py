"""BackupPolicy: which runs get a host copy, and when. Users choose one with `--write-policy`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...config import KVCacheConfig, WritePolicy
from ..run import Run

DECAY = 0.9
"""Per step: a rush of new prompts is remembered for some twenty steps."""


class BackupPolicy:
    """What a value of `config.WritePolicy` means. This one never wants a copy; the others override what they need.

    `Tiering` asks, finds room on the host, and copies; it passes over runs that have a host copy. A run for which there
    is no room gets no copy, which costs speed and nothing else.
    """

    hits_that_count = 0
    """The policy needs hit counts up to this number. `Run.hits` stops there: blocks with different counts cannot share
    a run, so counting further would make runs shorter.
    """

    saves_at_eviction = False
    """A run that leaves the device without a host copy is copied first."""

    weighs = False
    """A block is copied only if it is worth as much as what would have to leave the host for it."""

    def on_hit(self, leaf: Run) -> Sequence[Run]:
        """Runs to copy, in prompt order: the path to `leaf`, all on the device, has served one more request."""
        return ()

    def on_completion(self, runs: Sequence[Run]) -> Sequence[Run]:
        """Runs to copy, in prompt order, of `runs`, the last of whose blocks have just been computed."""
        return ()

    def blocks_ahead(self, num_evicted: int, num_device: int, num_host: int) -> int:
        """How many blocks, from the next to leave the device on, are to be copied before they must go. Asked once per
        step, in which `num_evicted` blocks have left it; the tiers have room for so many blocks now.
        """
        return 0


class WriteThrough(BackupPolicy):
    """As soon as a block is complete. Hits, and blocks that follow, try again for which there was no room."""

    def on_hit(self, leaf: Run) -> Sequence[Run]:
        return leaf.path()

    def on_completion(self, runs: Sequence[Run]) -> Sequence[Run]:
        return runs


class WriteThroughSelective(BackupPolicy):
    """Once a block has been hit often enough."""

    def __init__(self, threshold: int) -> None:
        self.hits_that_count = threshold

    def on_hit(self, leaf: Run) -> Sequence[Run]:
        return [run for run in leaf.path() if run.hits >= self.hits_that_count]


class WriteBack(BackupPolicy):
    """When the device tier evicts a block."""

    saves_at_eviction = True


class Auto(WriteBack):
    """Write back, ahead of time, and only what is worth its place on the host.

    An eviction that has to copy first holds up the prompt that needs the slots, and its blocks cannot be found until
    the step has been taken. So as many blocks as left in the busiest step of late are kept copied, from the next to
    leave on. A block that is used again first was copied for nothing; there are few of them at that end of the order.

    A block that will hardly come back is not copied where it would push out a better one, if the host's eviction order
    can tell them apart.
    """

    weighs = True

    def __init__(self) -> None:
        self._pace = 0.0
        """Blocks that leave in a step, at the busiest, as time goes by."""

    def blocks_ahead(self, num_evicted: int, num_device: int, num_host: int) -> int:
        self._pace = max(float(num_evicted), DECAY * self._pace)
        # Of a short host tier more would be missing than it is worth: they are in both tiers for a while.
        return min(int(self._pace), max(1, min(num_device // 8, num_host // 32)))


BACKUP_POLICIES: dict[WritePolicy, Callable[[KVCacheConfig], BackupPolicy]] = {
    WritePolicy.AUTO: lambda config: Auto(),
    WritePolicy.WRITE_THROUGH: lambda config: WriteThrough(),
    WritePolicy.WRITE_THROUGH_SELECTIVE: lambda config: WriteThroughSelective(config.write_through_threshold),
    WritePolicy.WRITE_BACK: lambda config: WriteBack(),
}
"""A new one is a class above and a line here."""
