"""What the workers' copies have cost so far, as both servers count it."""

from __future__ import annotations

from dataclasses import dataclass, field

from .messages import CacheLevel, TransferReport, TransferResult


@dataclass
class CopyTotals:
    """One direction of copies."""

    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0
    failures: int = 0

    def add(self, result: TransferResult) -> None:
        if result.ok:
            self.blocks += result.num_blocks
            self.bytes += result.num_bytes
        else:
            self.failures += 1
        self.seconds += result.seconds


@dataclass
class RankCopies:
    """Totals of one worker rank since its start. One thread writes; any thread may read single fields."""

    swap_in: CopyTotals = field(default_factory=CopyTotals)
    swap_out: CopyTotals = field(default_factory=CopyTotals)
    exposed_wait_s: float = 0.0
    """Seconds that compute stood still for copies."""

    def add(self, report: TransferReport) -> None:
        self.exposed_wait_s += report.exposed_wait_s
        for result in report.transfers:
            totals = self.swap_in if result.target is CacheLevel.DEVICE else self.swap_out
            totals.add(result)
