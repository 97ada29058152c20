"""BackupPolicy: which runs get a host copy, and when. Users choose one with `--write-policy`."""

from __future__ import annotations

from collections.abc import Sequence

from ...config import KVCacheConfig
from ..run import Run


class BackupPolicy:
    """What a value of `config.WritePolicy` means. This one never wants a copy; the others override what they need.

    `Tiering` asks, finds room on the host, and copies; it passes over runs that have a host copy. A run for which there
    is no room gets no copy, which costs speed and nothing else. Not thread-safe: the manager's lock covers it.
    """

    hits_that_count = 0
    """The policy needs hit counts up to this number. `Run.hits` stops there: blocks with different counts cannot share
    a run, so counting further would make runs shorter.
    """

    saves_at_eviction = False
    """A run that leaves the device without a host copy is mostly copied first."""

    weighs = False
    """A block is copied only if it is worth as much as what would have to leave the host for it."""

    def __init__(self, config: KVCacheConfig) -> None:
        """Takes what it needs of the settings, but no sizes: the device tier may be resized."""

    def on_hit(self, leaf: Run) -> Sequence[Run]:
        """Runs to copy, in prompt order: the path to `leaf`, all on the device, has served one more request."""
        return ()

    def on_completion(self, runs: Sequence[Run]) -> Sequence[Run]:
        """Runs to copy, in prompt order, of `runs`, the last of whose blocks have just been computed."""
        return ()

    def on_eviction(self, run: Run) -> bool:
        """Is `run`, which is about to leave the device and has no host copy, to be copied first?"""
        return False

    def blocks_ahead(self, num_evicted: int, num_device: int, num_host: int) -> int:
        """How many blocks, from the next to leave the device on, are to be copied before they must go. Asked once per
        step, in which `num_evicted` blocks have left it; the tiers have room for so many blocks now.
        """
        return 0
