"""WriteThroughSelective: a block gets its host copy once it has been hit often enough."""

from __future__ import annotations

from collections.abc import Sequence

from ...config import KVCacheConfig
from ..run import Run
from .backup import BackupPolicy


class WriteThroughSelective(BackupPolicy):
    def __init__(self, config: KVCacheConfig) -> None:
        self.hits_that_count = config.write_through_threshold

    def on_hit(self, leaf: Run) -> Sequence[Run]:
        return [run for run in leaf.path() if run.hits >= self.hits_that_count]
