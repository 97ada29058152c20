"""What the engine and the storage threads of its workers say to each other. Immutable and picklable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..contract.messages import BlockHash
from .namespace import Namespace

__all__ = [
    "CommitDone",
    "Connect",
    "Connected",
    "LaneConnected",
    "LoadBlocks",
    "LoadDone",
    "QueryDone",
    "StoreBlocks",
    "StoreDone",
    "TouchDone",
    "UseNamespace",
]


@dataclass(frozen=True)
class LaneConnected:
    """The first message of every lane: the names of the sockets are not needed any more."""


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
class LoadBlocks:
    """Fill host `slots` with the blocks of `hashes`."""

    load_id: str
    hashes: tuple[BlockHash, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True)
class StoreBlocks:
    """Store the blocks of `hashes`, which are in host `slots` and stay there until the answer."""

    store_id: str
    hashes: tuple[BlockHash, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True)
class LoadDone:
    """No byte of this load can arrive in its slots any more, once `quiet_after_s` have passed."""

    operation: ClassVar[str] = "load"
    load_id: str
    rank: int
    num_arrived: int
    """Blocks that are there, from the first one on, and are what they should be."""
    is_damaged: bool = False
    """The block after them arrived, and did not match its checksum."""
    num_bytes: int = 0
    seconds: float = 0.0
    error: str | None = None
    quiet_after_s: float = 0.0


@dataclass(frozen=True)
class StoreDone:
    """The slots of this store are not read any more, once `quiet_after_s` have passed."""

    operation: ClassVar[str] = "store"
    store_id: str
    rank: int
    num_written: int
    """Blocks that were not stored before."""
    num_bytes: int = 0
    seconds: float = 0.0
    error: str | None = None
    num_refused: int = 0
    """Blocks that the store had no room for. It works, and may have room later."""
    quiet_after_s: float = 0.0


@dataclass(frozen=True)
class CommitDone:
    """The blocks of a store, whose parts all ranks have stored, can be found from now on, unless there is an error."""

    store_id: str
    error: str | None = None


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
