"""What an adapter of a contender provides. The player times each verb alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple


class Copies(NamedTuple):
    """Blocks copied from the device to the host where `is_out`, else back."""

    is_out: bool
    sources: Sequence[int]
    targets: Sequence[int]


class Contender(ABC):
    """One cache manager, made with `device` and `host` blocks of `block_size` tokens. `arrive`, `table` and
    `copies` are not timed; `key` is timed apart, and the sum of the other verbs is the time of a request.
    """

    version: str
    now = 0.0
    """The time of the trace in seconds, which the player sets: for a manager that takes its time from outside."""

    @abstractmethod
    def arrive(self, number: int, tokens: list[int]) -> Any:
        """Make the engine's request of a prompt."""

    def key(self, request: Any) -> None:  # noqa: B027
        """Hash the prompt, in an engine that does it before its manager is asked. Others leave it as it is."""

    @abstractmethod
    def start(self, request: Any) -> None:
        """Match the prompt and allocate the rest. Raises where there is no room."""

    @abstractmethod
    def commit(self, request: Any) -> None:
        """The prompt has been computed and one token sampled."""

    @abstractmethod
    def finish(self, request: Any) -> None:
        """Free the request; its blocks stay cached."""

    @abstractmethod
    def table(self, request: Any) -> tuple[list[int], int]:
        """A slot per block of the prompt, in order, and how many of them were matched."""

    def copies(self) -> Iterable[Copies]:
        """Take the copies between the tiers that were planned since the last call, in order. They are done at once."""
        return ()

    @abstractmethod
    def cached_blocks(self) -> int:
        """Blocks that a later request can match."""
