"""WriteThrough: a block gets its host copy as soon as it is complete."""

from __future__ import annotations

from collections.abc import Sequence

from ..run import Run
from .backup import BackupPolicy


class WriteThrough(BackupPolicy):
    """Hits, and blocks that follow, try again for which there was no room."""

    def on_hit(self, leaf: Run) -> Sequence[Run]:
        return leaf.path()

    def on_completion(self, runs: Sequence[Run]) -> Sequence[Run]:
        return runs
