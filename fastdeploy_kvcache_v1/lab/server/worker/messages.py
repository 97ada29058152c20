"""What crosses between the engine process and a worker process, over one pipe. Plain picklable data.

Engine to worker: a `WorkerLaunch`, then one `BatchRequest` per step, or `None` to stop. Worker to engine: `WorkerReady`
or the `KVCacheError` why it does not start, then one `StepResult` per batch, `WorkerReport`s for copies that end
between two steps, and with a role `TransferNews` of leases and fetches that ended.
"""

from __future__ import annotations

from dataclasses import dataclass

from ....contract.messages import RankCopies
from ....storage.namespace import Namespace
from ....transfer.role_info import RankInfo
from ..settings import ServerConfig


@dataclass(frozen=True, kw_only=True)
class WorkerLaunch:
    """What a worker process is told when it starts."""

    config: ServerConfig
    namespace: Namespace | None = None
    """Of its blocks, where a store or another server has some."""
    rank: int = 0
    storage_addresses: tuple[str, str] = ("", "")
    """Of its storage agent's commands and answers, with storage."""
    parent_pid: int = 0


@dataclass(frozen=True)
class WorkerReady:
    """The model is loaded and both tiers are allocated."""

    copies: RankCopies
    """What it has counted."""
    transfer: RankInfo | None = None
    """Where other servers reach it, with a role."""
