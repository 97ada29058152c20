"""BackupPolicy: which runs get a host copy, and when."""

from __future__ import annotations

from collections.abc import Sequence

from ...config import KVCacheConfig
from ..run import Run


class BackupPolicy:
    """What `config.WritePolicy` names. This one never wants a copy; the others say when they do.

    `Tiering` asks, finds room on the host, and copies; it passes over runs that have a host copy. What had no room is
    lost to nothing but speed. Not thread-safe: the manager's lock covers it.
    """

    hits_that_count = 0
    """Hits of a block that the policy tells apart. More are not counted: they would keep blocks apart."""

    def __init__(self, config: KVCacheConfig) -> None:
        """Takes what it needs of the settings."""

    def on_hit(self, leaf: Run) -> Sequence[Run]:
        """Runs to copy, in prompt order: the path to `leaf`, all on the device, has served one more request."""
        return ()

    def on_completion(self, runs: Sequence[Run]) -> Sequence[Run]:
        """Runs to copy, in prompt order, of `runs`, the last of whose blocks have just been computed."""
        return ()

    def on_eviction(self, run: Run) -> bool:
        """Is `run`, which is about to leave the device and has no host copy, to be copied first?"""
        return False
