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

from ....contract.messages import BatchRequest, RankCopies
from ....errors import ConfigError
from ....link.engine import EngineLink
from ....link.place import MAX_SOCKET_PATH
from ....storage.backends import open_store
from ....storage.engine.link import StorageLink
from ....storage.namespace import Namespace
from ....storage.process import StoreProcess
from ....storage.settings import StorageSettings
from ....transfer.role_info import RankInfo
from ...model.ranks import rank_pipes
from ..settings import ServerConfig
from .messages import LINK_TYPES, WorkerLaunch
from .rank_process import POLL_S, STOP_TIMEOUT_S, Answer, RankProcess

__all__ = ["STOP_TIMEOUT_S", "ProcessWorkerClient", "StartInterruptedError"]

logger = logging.getLogger(__name__)

MAX_PARENT_PATH = MAX_SOCKET_PATH - len("/fastdeploy-kvcache-12345678/link")


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
        """Directory of the link's socket, until each rank is ready."""
        self._link: EngineLink | None = None
        """To the ranks, with storage."""
        self.storage: StorageLink | StoreProcess | None = None
        """What reaches the store, with storage."""
        self.copies: list[RankCopies] = []
        """Totals of each rank when it was ready."""
        self.rank_infos: list[RankInfo] = []
        """Addresses of each rank for other servers, with a role."""
        try:
            if config.storage is not None:
                self._directory = _private_directory()
                self._link, self.storage = _open_storage(config, config.storage, self._directory)
            for rank, peers in enumerate(rank_pipes(config.tensor_parallel_size)):
                launch = WorkerLaunch(
                    config=config,
                    namespace=namespace,
                    rank=rank,
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


def _open_storage(
    config: ServerConfig, settings: StorageSettings, directory: Path
) -> tuple[EngineLink, StorageLink | StoreProcess]:
    """Raises `ConfigError`."""
    num_ranks, model = config.tensor_parallel_size, config.model
    ranks = EngineLink(directory / "link", num_ranks, LINK_TYPES, word=directory.name)
    store = open_store(settings, ranks, lambda: None if model.ranks_cache_alike else model.num_kv_heads)
    ranks.listen(store.handlers, store.rank_gone)
    return ranks, store.link


def _private_directory() -> Path:
    """Make a directory with mode 0700 and a path short enough for unix sockets. Raises `ConfigError`."""
    try:
        parent = tempfile.gettempdir()
        if len(os.fsencode(parent)) > MAX_PARENT_PATH:
            parent = "/tmp"
        return Path(tempfile.mkdtemp(prefix="fastdeploy-kvcache-", dir=parent))
    except OSError as error:
        raise ConfigError(f"cannot make a temporary directory: {error}: set TMPDIR to another place") from None
