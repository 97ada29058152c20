"""Answers of the tensor-parallel ranks, combined into the answer of one worker.

A copy succeeds when it has on each rank that makes it, and fails when it has on one. A step is done when each rank has
done it. Reports of different ranks come in any order, those of one rank in order.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from ....contract.messages import CopyKind, CopyResult, WorkerReport
from ....errors import InvariantError, RanksDisagreeError
from ...model.step import StepResult

__all__ = ["RankAnswers"]

CopyId = tuple[int, CopyKind]
"""Swap step and kind: a step has one copy of each kind."""


@dataclass
class _OpenCopy:
    ranks: set[int] = field(default_factory=set)
    slowest: CopyResult | None = None
    has_failed: bool = False
    """The failure was reported."""


class RankAnswers:
    """Not thread-safe. Memory: O(copies that some ranks have reported and others have not)."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._open: dict[CopyId, _OpenCopy] = {}
        self._results: tuple[deque[StepResult], ...] = tuple(deque() for _ in range(num_ranks))
        self._ended_through = [-1] * num_ranks

    def take_report(self, rank: int, report: WorkerReport) -> WorkerReport:
        """The copies that this report completes on all ranks, and those that fail for the first time.

        A failure is returned once and at once. The copy may still run on other ranks, whose hazard tables hold it.
        """
        self._ended_through[rank] = max(self._ended_through[rank], report.ended_through)
        decided = [decided for each in report.transfers if (decided := self._take(rank, each)) is not None]
        return replace(report, transfers=tuple(decided), ended_through=min(self._ended_through))

    def take_step(self, rank: int, result: StepResult) -> StepResult | None:
        """The step's result once each rank has answered, with the longest wait for copies.

        A task that fails on one rank fails on all. Raises `RanksDisagreeError` for different tokens.
        """
        self._results[rank].append(result)
        if not all(self._results):
            return None
        answers = [results.popleft() for results in self._results]
        merged, *others = answers
        for other in others:
            if (other.tokens, other.drafts) != (merged.tokens, merged.drafts):
                raise RanksDisagreeError("the ranks sampled different tokens for the same step (a bug)")
        return replace(
            merged,
            retry={name: reason for each in answers for name, reason in each.retry.items()},
            errors={name: reason for each in answers for name, reason in each.errors.items()},
            report=WorkerReport(
                exposed_wait_since_last_s=max(each.report.exposed_wait_since_last_s for each in answers)
            ),
        )

    def check(self) -> None:
        """Raises `InvariantError`."""
        for (step, kind), copy in self._open.items():
            if not 0 < len(copy.ranks) < self._num_ranks:
                raise InvariantError(f"copy {kind} of step {step} is open with the reports of {sorted(copy.ranks)}")
            if step <= min(self._ended_through):
                raise InvariantError(f"copy {kind} of step {step} is open, and every rank has told of that step")
        if all(self._results):
            raise InvariantError("every rank has answered a step that was not taken")

    def _take(self, rank: int, result: CopyResult) -> CopyResult | None:
        kind = (result.source, result.target)
        name = (result.step, kind)
        copy = self._open.setdefault(name, _OpenCopy())
        if rank in copy.ranks:
            raise InvariantError(f"rank {rank} reported a copy of step {result.step} twice")
        copy.ranks.add(rank)
        if copy.slowest is None or result.seconds > copy.slowest.seconds:
            copy.slowest = result
        is_complete = len(copy.ranks) == self._num_ranks
        if is_complete:
            del self._open[name]
        if copy.has_failed:
            return None
        if not result.ok:
            copy.has_failed = True
            return replace(result, error=f"rank {rank}: {result.error}") if self._num_ranks > 1 else result
        return copy.slowest if is_complete else None
