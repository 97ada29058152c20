"""DecodeRank: fills the blocks that its engine has given to requests."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from .rank_role import RankRole


class DecodeRank(RankRole):
    """Sequences start with their first token: what is computed here is nothing that a peer reads."""

    _listens = True

    def insert(self, tasks: Sequence[Any]) -> None:
        """A batch says nothing of transfers."""

    def begin_pass(self, ends: Iterable[tuple[str, int]]) -> None:
        """No peer reads it."""

    def layer_begins(self, layer: int) -> None:
        """No peer reads it."""

    def end_pass(self, computed: Collection[str]) -> None:
        """No peer reads it."""

    def failed(self, request_id: str, reason: str) -> None:
        """No peer reads it."""

    def turn(self, step: int) -> None:
        self.transfers.handle(self._channel.take(), step=step)
        self._tell_ended()

    def _tell_ended(self) -> None:
        news = self.transfers.take_news()
        if news:
            self._channel.tell(news)
