"""StoreLink: how the storage tier reaches a store over the host tier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ...contract.messages import BlockHash
from ..messages import Connected, Failing, LoadDone, QueryDone, RankDone, StoreDone, TouchDone
from ..namespace import Namespace

__all__ = ["Answer", "CommandLink", "StoreLink"]

Answer = QueryDone | LoadDone | StoreDone | TouchDone | RankDone | Failing | Connected
"""A store may answer with a subclass that says more."""


class StoreLink(Protocol):
    """Nothing here blocks. Each command is answered once, on another thread, whatever happens to the store."""

    num_ranks: int

    @property
    def is_serving(self) -> bool:
        """False: what is sent now is answered at once, with an error."""

    def use_namespace(self, namespace: Namespace) -> None:
        """What is sent from here on is about blocks of `namespace`. What was sent before ends in its own."""

    def query(self, query_id: str, hashes: Sequence[BlockHash]) -> None:
        """Ask how many of `hashes` are stored. Answered by a `QueryDone`."""

    def load(self, load_id: str, hashes: Sequence[BlockHash], slots: Sequence[int]) -> None:
        """Fill host slots of all ranks. Answered by a `LoadDone`: from then on no byte arrives there."""

    def store(self, store_id: str, hashes: Sequence[BlockHash], slots: Sequence[int]) -> None:
        """Store what is in host slots of all ranks. Answered by a `StoreDone`: from then on they are not read."""

    def touch(self, touch_id: str, hashes: Sequence[BlockHash]) -> None:
        """These blocks, from the first one of a prompt on, are in use: others should go first. Answered by a
        `TouchDone`.
        """


class CommandLink(Protocol):
    """How the storage tier reaches a store over the device tier: each rank takes commands, and answers.

    What is sent to a rank whose process has ended is lost, and never answered.
    """

    num_ranks: int

    def send(self, command: object) -> None:
        """To every rank. Does not block."""
