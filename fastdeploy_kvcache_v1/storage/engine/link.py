"""StorageLink: the engine's end of the agents of a store over the device tier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...link.engine import EngineLink
from ..messages import LoadDone, RankDone, StoreDone

__all__ = ["StorageLink"]


class StorageLink:
    """Over the link to the ranks, which the host makes, gives `handlers` to, and closes."""

    def __init__(self, ranks: EngineLink, answers: Sequence[type]) -> None:
        """`answers`: types of what agents answer."""
        self.num_ranks = ranks.num_ranks
        self._ranks = ranks
        self._on_answer: Callable[[Any], None] = _drop
        self.handlers = dict.fromkeys(answers, self._heard)
        """For `EngineLink.listen`."""

    @property
    def is_ready(self) -> bool:
        """All ranks are connected. What is sent before is lost."""
        return self._ranks.is_complete

    def listen(self, on_answer: Callable[[Any], None]) -> None:
        """Deliver answers, on the thread of the link to the ranks."""
        self._on_answer = on_answer

    def send(self, command: object) -> None:
        """Send to every rank. One that is not there does not answer: its death is told elsewhere."""
        self._ranks.send(command)

    def close(self) -> None:
        """Deliver nothing from now on. Idempotent."""
        self._on_answer = _drop

    def _heard(self, rank: int, answer: Any) -> None:
        is_of_each_rank = isinstance(answer, LoadDone | StoreDone) and answer.operation != "flush"
        self._on_answer(RankDone(rank, answer) if is_of_each_rank else answer)


def _drop(answer: Any) -> None:
    """There is no listener."""
