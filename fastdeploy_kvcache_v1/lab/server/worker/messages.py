"""Messages between the engine process and a worker process, over one pipe. Plain picklable data.

Engine to worker: a `WorkerLaunch`, then a `BatchRequest` per step, or `None` to stop. Worker to engine: `WorkerReady`,
or the `KVCacheError` that prevents a start. Then `LayerComputed` and a `StepResult` per batch, a `WorkerReport` for
copies that end between steps, and with a role `TransferNews` of leases and fetches that ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ....contract.messages import RankCopies
from ....link.messages import MessageTypes
from ....storage.attention_store import tasks
from ....storage.namespace import Namespace
from ....transfer.role_info import RankInfo
from ..settings import ServerConfig

LINK_TYPES = MessageTypes(to_engine=tasks.ANSWERS, to_rank=tasks.COMMANDS)


@dataclass(frozen=True, kw_only=True)
class WorkerLaunch:
    """Settings of a worker process."""

    config: ServerConfig
    namespace: Namespace | None = None
    """Namespace of its blocks, with a store or a role."""
    rank: int = 0
    link: Path | None = None
    """Socket of the engine's link, in a directory that names the engine, with storage."""
    parent_pid: int = 0


@dataclass(frozen=True)
class WorkerReady:
    """The model is loaded and both tiers are allocated."""

    copies: RankCopies
    """Totals so far."""
    transfer: RankInfo | None = None
    """Its address for other servers, with a role."""
