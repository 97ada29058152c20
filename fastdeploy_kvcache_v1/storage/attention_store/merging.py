"""Merging: the answers of all ranks to one command, as the one answer that the storage tier expects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..messages import LoadDone, RankDone, StoreDone
from .tasks import WriteDone

__all__ = ["Merging"]


class Merging:
    """Not thread-safe."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._open: dict[str, list[RankDone]] = {}
        """By name of the command: what ranks have answered."""

    def add(self, done: RankDone) -> LoadDone | StoreDone | None:
        """Return the merged answer once all ranks have answered."""
        answer = done.answer
        name = answer.load_id if isinstance(answer, LoadDone) else answer.store_id
        answers = self._open.setdefault(name, [])
        answers.append(done)
        return _merged(self._open.pop(name)) if len(answers) == self._num_ranks else None


def _merged(answers: Sequence[RankDone]) -> LoadDone | StoreDone:
    parts = [done.answer for done in answers]
    errors = [f"rank {done.rank}: {done.answer.error}" for done in answers if done.answer.error is not None]
    last = replace(
        parts[-1],
        error=errors[0] if errors else None,
        num_bytes=sum(each.num_bytes for each in parts),
        seconds=max(each.seconds for each in parts),
    )
    if isinstance(last, LoadDone):
        loads = [each for each in parts if isinstance(each, LoadDone)]
        return replace(
            last,
            num_arrived=min(each.num_arrived for each in loads),
            is_damaged=any(each.is_damaged for each in loads),
        )
    stores = [each for each in parts if isinstance(each, StoreDone)]
    last = replace(
        last,
        num_written=max(each.num_written for each in stores),
        num_refused=max(each.num_refused for each in stores),
    )
    if isinstance(last, WriteDone):
        return replace(last, num_stored=min(each.num_stored for each in stores if isinstance(each, WriteDone)))
    return last
