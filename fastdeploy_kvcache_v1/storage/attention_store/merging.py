"""Merging: the answers of all ranks to one command, as the one answer that the storage tier expects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..messages import LoadDone, RankDone, StoreDone
from .tasks import WriteDone

__all__ = ["Merging"]


class Merging:
    """Not thread-safe."""

    def __init__(self, num_ranks: int, clock: Callable[[], float]) -> None:
        self._num_ranks = num_ranks
        self._clock = clock
        self._open: dict[str, list[tuple[RankDone, float]]] = {}
        """By name of the command: what ranks have answered, and when no byte of theirs moves any more."""

    def add(self, done: RankDone) -> LoadDone | StoreDone | None:
        """Return the merged answer once all ranks have answered."""
        answer, now = done.answer, self._clock()
        name = answer.load_id if isinstance(answer, LoadDone) else answer.store_id
        answers = self._open.setdefault(name, [])
        answers.append((done, now + answer.quiet_after_s))
        if len(answers) < self._num_ranks:
            return None
        del self._open[name]
        quiet_after_s = max(0.0, max(quiet_at for _, quiet_at in answers) - now)
        return replace(_merged([done for done, _ in answers]), quiet_after_s=quiet_after_s)


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
