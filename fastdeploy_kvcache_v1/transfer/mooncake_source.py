"""MooncakeSource: one peer's tensors, read by an engine that is dropped when a read fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import RemoteReadError
from .one_sided import OneSidedSource, Ranges, Region

__all__ = ["MooncakeSource"]


class MooncakeSource(OneSidedSource):
    """A peer that stands still ends a read after the engine's own 2 s."""

    most_spans = 2047
    """The engine refuses more than 2,048 as a whole."""
    most_bytes = 64 << 20

    def __init__(self, engine: Any, session: str, theirs: Sequence[Region], ours: Sequence[Region]) -> None:
        """`engine` is used by this source only."""
        super().__init__(session, theirs, ours)
        self._engine = engine
        self._session = session

    def _copy(self, ranges: Ranges, deadline: float) -> None:
        theirs, ours, counts = ranges.T.tolist()
        if self._engine.batch_transfer_sync_read(self._session, ours, theirs, counts) != 0:
            raise RemoteReadError("mooncake says that the transfer failed")

    def _let_go(self) -> None:
        self._engine = None  # waits for its threads: what was queued does not arrive any more
