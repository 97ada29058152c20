"""What crosses between the engine process and a worker process, over one pipe. Plain picklable data.

Engine to worker: a `WorkerLaunch`, then one `BatchRequest` per step, or `None` to stop. Worker to engine: `WorkerReady`
or the `KVCacheError` why it does not start, then one `StepResult` per batch, `TransferReport`s for copies that end
between two steps, and with a role `TransferNews` of leases and fetches that ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...metadata import CopyPath
from ...storage.namespace import Namespace
from ...transfer.role_info import RankInfo
from ..settings import ServerConfig


@dataclass(frozen=True, kw_only=True)
class WorkerLaunch:
    """What a worker process is told when it starts."""

    config: ServerConfig
    namespace: Namespace | None = None
    """Of its blocks, where a store or another server has some."""
    rank: int = 0
    directory: Path
    """Where storage agents meet the engine, until every rank is ready."""
    parent_pid: int = 0


def storage_addresses(directory: Path, rank: int) -> tuple[str, str]:
    """Commands for one rank's storage agent, and the answers of all."""
    return f"ipc://{directory / f'storage-commands{rank}'}", f"ipc://{directory / 'storage-results'}"


@dataclass(frozen=True)
class WorkerReady:
    """The model is loaded and both tiers are allocated."""

    paths: tuple[CopyPath, ...] = ()
    """How it copies, for the metrics."""
    transfer: RankInfo | None = None
    """Where other servers reach it, with a role."""
