"""Reports of all ranks as the engine takes them: each failed copy once, however many ranks it failed on."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

from ..contract.messages import CacheLevel, CopyResult, RankCopies, WorkerReport


class FailedCopies:
    """Not thread-safe. Memory: O(failed copies of steps that some rank has not ended)."""

    def __init__(self, num_ranks: int) -> None:
        self._ended_through = [-1] * num_ranks
        self._told: set[tuple[int, CacheLevel]] = set()
        """Step and target of failed copies."""

    def take(self, rank: int, report: WorkerReport) -> tuple[CopyResult, ...]:
        """Failures that no rank has reported before. Each rank reports a copy before the step counts as ended."""
        first = []
        for each in report.transfers:
            if not each.ok and (name := (each.step, each.target)) not in self._told:
                self._told.add(name)
                error = f"rank {rank}: {each.error}" if len(self._ended_through) > 1 else each.error
                first.append(replace(each, error=error))
        self._ended_through[rank] = max(self._ended_through[rank], report.ended_through)
        if self._told:
            through = min(self._ended_through)
            self._told = {name for name in self._told if name[0] > through}
        return tuple(first)


class Reports:
    """Between the thread of the link and the one that schedules. Thread-safe."""

    def __init__(self, num_ranks: int) -> None:
        self.copies: dict[int, RankCopies] = {}
        """Totals by rank, of its last report."""
        self._failed = FailedCopies(num_ranks)
        self._lock = threading.Lock()
        self._new: dict[int, WorkerReport] = {}

    def put(self, rank: int, report: WorkerReport) -> None:
        if report.copies is not None:
            self.copies[rank] = report.copies
        with self._lock:
            self._new[rank] = self._new[rank].merged(report) if rank in self._new else report

    def take(self) -> Sequence[tuple[int, WorkerReport]]:
        """What each rank has said since the last call, with failed copies alone. O(1) when that is nothing."""
        if not self._new:
            return ()
        with self._lock:
            new, self._new = self._new, {}
        return [(rank, replace(report, transfers=self._failed.take(rank, report))) for rank, report in new.items()]
