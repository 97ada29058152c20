"""BackupPolicy: which runs get a host copy, and when. Users choose one with `--write-policy`."""

from __future__ import annotations

from collections.abc import Callable

from ...config import KVCacheConfig, WritePolicy

DECAY = 0.9
"""Per step: a burst of new prompts is remembered for about twenty steps."""


class BackupPolicy:
    """The meaning of a value of `config.WritePolicy`.

    `Tiering` asks, makes room on the host, and copies runs that have no host copy. A run for which there is no room
    gets no copy, which costs speed only.
    """

    weighs = False
    """True: a block is copied only if it is worth at least as much as the one that would leave the host for it."""

    def __init__(self, *, copied_after_hits: int | None = None, saves_at_eviction: bool = False) -> None:
        self.copied_after_hits = copied_after_hits
        """Number of hits after which a run is copied, tried again at later hits; 0: as soon as its blocks are complete.
        None: hits cause no copy. `Run.hits` stops at this number, because blocks with different counts cannot share a
        run.
        """
        self.saves_at_eviction = saves_at_eviction
        """True: a run evicted from the device without a host copy is copied first."""

    def blocks_ahead(self, num_evicted: int, num_device: int, num_host: int) -> int:
        """Return how many blocks, the next to be evicted first, are to be copied ahead of their eviction. Called once
        per step, in which `num_evicted` blocks left the device. The tiers have `num_device` and `num_host` slots.
        """
        return 0


class Auto(BackupPolicy):
    """Write back just before eviction, unless the block is worth less than the one it would replace on the host.

    An eviction that must copy first delays the prompt that needs the slots, and its blocks cannot be found until the
    step is taken. So the next blocks to leave are kept copied: as many as left in the busiest recent step. A copy is
    wasted if its block is used again first, which is rare at that end of the order.
    """

    weighs = True

    def __init__(self) -> None:
        super().__init__(saves_at_eviction=True)
        self._pace = 0.0
        """Blocks evicted in the busiest step, decaying with time."""

    def blocks_ahead(self, num_evicted: int, num_device: int, num_host: int) -> int:
        self._pace = max(float(num_evicted), DECAY * self._pace)
        # Blocks copied ahead are in both tiers for a while, which a small host tier cannot afford.
        return min(int(self._pace), max(1, min(num_device // 8, num_host // 32)))


BACKUP_POLICIES: dict[WritePolicy, Callable[[KVCacheConfig], BackupPolicy]] = {
    WritePolicy.AUTO: lambda config: Auto(),
    WritePolicy.WRITE_THROUGH: lambda config: BackupPolicy(copied_after_hits=0),
    WritePolicy.WRITE_THROUGH_SELECTIVE: lambda config: BackupPolicy(copied_after_hits=config.write_through_threshold),
    WritePolicy.WRITE_BACK: lambda config: BackupPolicy(saves_at_eviction=True),
}
"""To add a policy, add a line here, and a class above if it needs one."""
