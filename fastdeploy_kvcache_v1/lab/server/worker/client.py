"""The engine's end of the worker processes, one per tensor-parallel rank."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import zmq

from ....contract.messages import BatchRequest, RankCopies
from ....errors import ConfigError
from ....link.engine import EngineLink
from ....link.messages import MessageTypes
from ....storage.backends import device_link
from ....storage.engine.link import StorageLink
from ....storage.host_memory import memory_handlers
from ....storage.namespace import Namespace
from ....storage.parts import Parts
from ....storage.process import StoreProcess
from ....transfer.role_info import RankInfo
from ...model.ranks import rank_pipes
from ..settings import ServerConfig
from .messages import WorkerLaunch
from .rank_process import POLL_S, STOP_TIMEOUT_S, Answer, RankProcess

__all__ = ["STOP_TIMEOUT_S", "ProcessWorkerClient", "StartInterruptedError"]

logger = logging.getLogger(__name__)

MAX_PARENT_PATH = 107 - len("/fastdeploy-kvcache-12345678/storage-commands12")
"""Unix socket names have at most 107 bytes."""


class StartInterruptedError(Exception):
    """The server was stopped while its workers started. They have ended."""


class ProcessWorkerClient:
    """Construct and `close` on the main thread: the workers die with the thread that started them."""

    def __init__(
        self,
        config: ServerConfig,
        *,
        namespace: Namespace | None = None,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start all ranks, and return when they can take batches. `namespace` of their blocks, with a store or a role.

        Raises `ConfigError`, `ModelError` or `StorageError` when a rank refuses its settings, model or store,
        `WorkerDiedError` when it ends for another reason, `StartInterruptedError` after `stop_requested`.
        """
        self._stop_requested = stop_requested
        self._ranks: list[RankProcess] = []
        self._is_dead = threading.Lock()
        """Held once the end of one rank was reported. The other ranks end because of it."""
        self._directory: Path | None = None
        """Directory of the storage sockets, until each rank is ready."""
        self._link: EngineLink | None = None
        """By which the store process gets the host tiers."""
        self.storage: StorageLink | StoreProcess | None = None
        """What reaches the store, with storage."""
        self.copies: list[RankCopies] = []
        """Totals of each rank when it was ready."""
        self.rank_infos: list[RankInfo] = []
        """Addresses of each rank for other servers, with a role."""
        try:
            addresses = [("", "")] * config.tensor_parallel_size
            if config.storage is not None:
                self._directory = _private_directory()
                if config.storage.uses_device_tier:
                    results = f"ipc://{self._directory / 'storage-results'}"
                    names = (f"storage-commands{rank}" for rank in range(config.tensor_parallel_size))
                    addresses = [(f"ipc://{self._directory / name}", results) for name in names]
                    self.storage = _bind_storage(addresses)
                else:
                    self._link, self.storage = _map_host_tiers(config, self._directory)
            for rank, peers in enumerate(rank_pipes(config.tensor_parallel_size)):
                launch = WorkerLaunch(
                    config=config,
                    namespace=namespace,
                    rank=rank,
                    storage_addresses=addresses[rank],
                    link=None if self._link is None else self._link.path,
                    parent_pid=os.getpid(),
                )
                self._ranks.append(RankProcess(launch, peers, on_poll=self._require_start))
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [rank.pid for rank in self._ranks]

    def listen(self, on_message: Callable[[int, Answer], None], on_death: Callable[[str], None]) -> None:
        """Deliver answers with their ranks, and up to one reason of an unexpected death, on threads of the client."""
        for number, rank in enumerate(self._ranks):
            rank.listen(partial(on_message, number), partial(self._tell_death, on_death))

    def send(self, batch: BatchRequest) -> None:
        """Send a batch to each rank without blocking. `on_death` reports a dead worker."""
        for rank in self._ranks:
            rank.send(batch)

    def close(self, deadline: float | None = None) -> None:
        """Stop the workers, which drop their batch, and free everything. No callback runs afterwards. Idempotent.

        Workers are killed at `deadline` (`time.monotonic`), by default after `STOP_TIMEOUT_S`.
        """
        for rank in self._ranks:
            rank.request_stop()
        deadline = deadline or time.monotonic() + STOP_TIMEOUT_S  # for all of them together
        for rank in self._ranks:
            rank.close(deadline)
        if self.storage is not None:
            self.storage.close()
        if self._link is not None:
            self._link.close()
        self._remove_directory()

    def _wait_until_ready(self) -> None:
        while isinstance(self.storage, StorageLink) and not self.storage.is_connected(round(POLL_S * 1000)):
            self._require_start()
        for rank in self._ranks:
            ready = rank.wait_ready()
            if ready.transfer is not None:
                self.rank_infos.append(ready.transfer)
            self.copies.append(ready.copies)
        while self._link is not None and not self._link.is_complete:
            self._require_start()
            time.sleep(POLL_S)
        self._remove_directory()  # not needed any more, and a SIGKILL would leave it behind

    def _require_start(self) -> None:
        """Raise for a rank that ended: the others would wait for it."""
        if self._stop_requested():
            raise StartInterruptedError("stopped while the worker started")
        for rank in self._ranks:
            rank.require_running()

    def _tell_death(self, on_death: Callable[[str], None], reason: str) -> None:
        if self._is_dead.acquire(blocking=False):
            logger.error("%s", reason)
            on_death(reason)

    def _remove_directory(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)


def _map_host_tiers(config: ServerConfig, directory: Path) -> tuple[EngineLink, StoreProcess]:
    """Raises `ConfigError`."""
    assert config.storage is not None
    num_ranks, model = config.tensor_parallel_size, config.model
    link = EngineLink(directory / "link", num_ranks, MessageTypes(), word=directory.name)
    parts = Parts.of(num_ranks, None if model.ranks_cache_alike else model.num_kv_heads)
    store = StoreProcess(config.storage, parts)
    link.listen(memory_handlers(link, store), store.drop_memory)
    return link, store


def _bind_storage(addresses: list[tuple[str, str]]) -> StorageLink:
    try:
        return device_link([commands for commands, _ in addresses], addresses[0][1])
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot make a socket at {addresses[0][1]}: {error}") from None


def _private_directory() -> Path:
    """Make a directory with mode 0700 and a path short enough for unix sockets. Raises `ConfigError`."""
    try:
        parent = tempfile.gettempdir()
        if len(os.fsencode(parent)) > MAX_PARENT_PATH:
            parent = "/tmp"
        return Path(tempfile.mkdtemp(prefix="fastdeploy-kvcache-", dir=parent))
    except OSError as error:
        raise ConfigError(f"cannot make a temporary directory: {error}: set TMPDIR to another place") from None
