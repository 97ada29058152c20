"""Answers of the tensor-parallel ranks to a batch, combined into the answer of one worker."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from ....contract.messages import WorkerReport
from ....errors import InvariantError, RanksDisagreeError
from ...model.step import StepResult

__all__ = ["RankAnswers"]


class RankAnswers:
    """Not thread-safe. Answers of different ranks come in any order, those of one rank in order."""

    def __init__(self, num_ranks: int) -> None:
        self._results: tuple[deque[StepResult], ...] = tuple(deque() for _ in range(num_ranks))

    def take(self, rank: int, result: StepResult) -> StepResult | None:
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
        if all(self._results):
            raise InvariantError("every rank has answered a step that was not taken")
