"""What the engine asks of the ranks' agents, and what these answer beside `LoadDone` and `QueryDone`.

Names and fields are those of FastDeploy's own tasks. Immutable and picklable.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from ..messages import Connect, Connected, Failing, LoadDone, QueryDone, StoreDone, UseNamespace

__all__ = [
    "ANSWERS",
    "COMMANDS",
    "CacheTask",
    "FlushDone",
    "MatchTask",
    "ReadStorageTask",
    "WriteDone",
    "WriteStorageTask",
]

TRANSFER_TIMEOUT_S = 30.0
MATCH_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class CacheTask:
    """About the last blocks of a path through the prefix tree."""

    task_id: str
    token_ids: tuple[int, ...]
    """Of all blocks from the root on, whole blocks only: the SDK knows no other name of a block."""


@dataclass(frozen=True, kw_only=True)
class MatchTask(CacheTask):
    """How many blocks of the path are stored? Rank 0 answers with a `QueryDone`."""

    first_block_idx: int
    """The answer counts from this block on."""
    timeout: float = MATCH_TIMEOUT_S


@dataclass(frozen=True, kw_only=True)
class ReadStorageTask(CacheTask):
    """Fill device blocks with the last blocks of the path. Every rank answers with a `LoadDone`."""

    gpu_block_ids: tuple[int, ...]
    start_read_block_idx: int
    """Which block of the path goes to the first of `gpu_block_ids`."""
    timeout: float = TRANSFER_TIMEOUT_S
    begun_at: float = math.inf
    """When the blocks were reserved (`time.monotonic`): those of a device tier that was made later are others."""


@dataclass(frozen=True, kw_only=True)
class WriteStorageTask(CacheTask):
    """Store blocks of the path, or say that this server has or has lost its last ones.

    Every rank answers a store with a `WriteDone`; rank 0 answers a statement with a `FlushDone`.
    """

    gpu_block_ids: tuple[int, ...] = ()
    """None for a statement."""
    start_write_block_idx: int = 0
    timeout: float = TRANSFER_TIMEOUT_S
    begun_at: float = math.inf
    """As in `ReadStorageTask`."""
    is_continued: bool = False
    """The blocks before are stored, and the store was asked how far it has the path."""
    flush_cache_exists: bool | None = None
    """None for a store. True: this server has the blocks from `start_write_block_idx` on; False: it lost them."""


@dataclass(frozen=True)
class WriteDone(StoreDone):
    """`num_written` counts what was not stored before."""

    num_stored: int = 0
    """Blocks of the path that are stored now, from the first one of the task on."""


@dataclass(frozen=True)
class FlushDone(StoreDone):
    """The index has learned it, unless there is an error."""

    operation: ClassVar[str] = "flush"


COMMANDS = (UseNamespace, Connect, MatchTask, ReadStorageTask, WriteStorageTask)
ANSWERS = (Connected, QueryDone, Failing, LoadDone, WriteDone, FlushDone)
"""Messages of a link to agents of the attention store."""
