"""What the engine and its store say to each other. Immutable.

A store over host slots answers each command once. With one over device slots, each rank answers, in a `RankDone`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..contract.messages import BlockHash
from .namespace import Namespace

__all__ = [
    "Connect",
    "Connected",
    "Ending",
    "Failing",
    "LoadBlocks",
    "LoadDone",
    "MappedSlots",
    "QueryBlocks",
    "QueryDone",
    "RankDone",
    "RanksDiffer",
    "Ready",
    "Start",
    "StoreBlocks",
    "StoreDone",
    "TouchBlocks",
    "TouchDone",
    "UseNamespace",
]


@dataclass(frozen=True)
class UseNamespace:
    """What comes after it is loaded from, and stored in, this namespace."""

    namespace: Namespace


@dataclass(frozen=True)
class Connect:
    """To ranks that connect only when there is something to do: connect now, and say so."""


@dataclass(frozen=True)
class Connected:
    """The rank can use the store in its namespace, unless there is an error."""

    operation: ClassVar[str] = "connect"
    rank: int
    seconds: float = 0.0
    error: str | None = None


@dataclass(frozen=True)
class QueryBlocks:
    """How many of `hashes`, from the first one on, are stored?"""

    query_id: str
    hashes: tuple[BlockHash, ...]

    def failed(self, error: str) -> QueryDone:
        return QueryDone(self.query_id, 0, error=error)


@dataclass(frozen=True)
class LoadBlocks:
    """Fill host `slots` with the blocks of `hashes`."""

    load_id: str
    hashes: tuple[BlockHash, ...]
    slots: tuple[int, ...]

    def failed(self, error: str) -> LoadDone:
        return LoadDone(self.load_id, 0, error=error)


@dataclass(frozen=True)
class StoreBlocks:
    """Store the blocks of `hashes`, which are in host `slots` and stay there until the answer."""

    store_id: str
    hashes: tuple[BlockHash, ...]
    slots: tuple[int, ...]

    def failed(self, error: str) -> StoreDone:
        return StoreDone(self.store_id, 0, error=error)


@dataclass(frozen=True)
class TouchBlocks:
    """These blocks, from the first one of a prompt on, are in use: others should go first."""

    touch_id: str
    hashes: tuple[BlockHash, ...]

    def failed(self, error: str) -> TouchDone:
        return TouchDone(self.touch_id, 0, error)


@dataclass(frozen=True)
class LoadDone:
    """No byte of this load can arrive in its slots any more."""

    operation: ClassVar[str] = "load"
    load_id: str
    num_arrived: int
    """Blocks that are there, from the first one on, and are what they should be."""
    is_damaged: bool = False
    """The block after them arrived, and did not match its checksum."""
    num_bytes: int = 0
    seconds: float = 0.0
    error: str | None = None


@dataclass(frozen=True)
class Failing:
    """A load over device slots has failed on a rank, and may still move bytes: its answer follows when it does not."""

    load_id: str
    error: str


@dataclass(frozen=True)
class StoreDone:
    """The slots of this store are not read any more."""

    operation: ClassVar[str] = "store"
    store_id: str
    num_written: int
    """Blocks that were not stored before."""
    num_bytes: int = 0
    seconds: float = 0.0
    error: str | None = None
    num_refused: int = 0
    """Blocks that the store had no room for. It works, and may have room later."""


@dataclass(frozen=True)
class RankDone:
    """The answer of one rank."""

    rank: int
    answer: LoadDone | StoreDone


@dataclass(frozen=True)
class TouchDone:
    """The store was told that blocks are in use, or the error says why not."""

    touch_id: str
    num_stored: int
    """Of these blocks, from the first one on."""
    error: str | None = None


@dataclass(frozen=True)
class QueryDone:
    """How many blocks of a prompt are stored, from the first one asked for on."""

    operation: ClassVar[str] = "query"
    query_id: str
    num_stored: int
    seconds: float = 0.0
    error: str | None = None


# ---- to and from the store process alone


@dataclass(frozen=True)
class MappedSlots:
    """Host slots of one rank, in memory that several processes map."""

    file: int
    """A descriptor of it."""
    num_slots: int
    slot_bytes: int


@dataclass(frozen=True)
class Start:
    """The first message to a store process."""

    settings: dict[str, Any]
    """Of a `StorageSettings`."""
    num_parts: int
    """Of each block, see `Parts`."""
    memories: tuple[MappedSlots, ...]
    """Of all ranks, in order."""
    life: int
    """See `SlotMemory`."""


@dataclass(frozen=True)
class Ready:
    """A lane has connected to the store, in the namespace that it was told."""

    lane: str


@dataclass(frozen=True)
class RanksDiffer:
    """Ranks that share a part hold different bytes: each rank must have a part of its own."""


@dataclass(frozen=True)
class Ending:
    """The process ends now: it cannot connect to the store, or cannot say when a failed call is over."""

    reason: str
