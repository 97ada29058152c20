"""What a worker process is told when it starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...storage.namespace import Namespace
from ...storage.settings import StorageSettings
from .transfers import TransferConfig


@dataclass(frozen=True)
class WorkerConfig:
    """Everything the worker processes need to know; the same for each rank."""

    model_path: Path | None
    max_model_len: int
    block_size: int
    cache_dtype: str
    num_device_blocks: int
    num_host_blocks: int
    log_level: str
    layer_timeout_s: float = 30.0
    num_threads: int = 1
    """Of each rank."""
    storage: StorageSettings | None = None
    namespace: Namespace | None = None
    """Of its blocks, if there is storage."""
    model_family: str | None = None
    mtp: bool = False
    """Both of the random model."""
    transfer: TransferConfig | None = None
    """Of a server with a role."""
    copy_faults: str = ""
    """Test hook, see `copy_faults.py`."""
    tensor_parallel_size: int = 1


@dataclass(frozen=True)
class WorkerLaunch:
    """What a worker process reads from its standard input."""

    config: WorkerConfig
    rank: int
    directory: Path
    """Where the sockets are, until every rank has connected."""
    parent_pid: int
    progress_fd: int
    """Inherited; see `liveness.py`."""
    ranks_timeout_s: float | None = None
    """A rank that says nothing to the others for this time counts as lost; None sets no limit."""

    @property
    def tasks_address(self) -> str:
        return self._address(f"tasks{self.rank}")

    @property
    def results_address(self) -> str:
        return self._address(f"results{self.rank}")

    @property
    def storage_addresses(self) -> tuple[str, str]:
        """For commands and results of the rank's storage agent, if there is storage."""
        return storage_addresses(self.directory, self.rank)

    @property
    def ranks_path(self) -> Path:
        """Where the ranks meet, if there are several."""
        return self.directory / "ranks"

    def _address(self, name: str) -> str:
        return f"ipc://{self.directory / name}"


def storage_addresses(directory: Path, rank: int) -> tuple[str, str]:
    """Commands for one rank's agent, and the answers of all."""
    return f"ipc://{directory / f'storage-commands{rank}'}", f"ipc://{directory / 'storage-results'}"
