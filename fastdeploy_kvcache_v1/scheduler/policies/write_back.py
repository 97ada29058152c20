"""WriteBack: a block gets its host copy when the device tier evicts it."""

from __future__ import annotations

from ..run import Run
from .backup import BackupPolicy


class WriteBack(BackupPolicy):
    saves_at_eviction = True

    def on_eviction(self, run: Run) -> bool:
        return True
