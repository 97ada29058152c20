"""AttentionStoreAgent: a worker rank's threads that call the SDK, which moves blocks from and to the device tier.

The engine sends a task only when every copy and pass that it told the workers before has been reported, so the slots
are quiet. What it cannot know is a copy that was given up and still runs: the agent waits for those.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from ...errors import KVCacheError, StorageError
from ..agent import STORE_NICENESS
from ..lane import Lane
from ..lane_agent import LaneAgent
from ..messages import LoadDone, QueryDone, UseNamespace
from ..namespace import Namespace
from .connections import Lease, SharedConnections
from .sdk import DeviceCaches, SdkConnection, SdkIdentity, load_sdk
from .tasks import FlushDone, MatchTask, ReadStorageTask, WriteDone, WriteStorageTask

__all__ = ["NUM_LANES", "AttentionStoreAgent"]

logger = logging.getLogger(__name__)

NUM_LANES = 3

QUIET_MARGIN_S = 1.0
"""Added to the time that the SDK was given for a call: clocks, and the last bytes on their way."""


class AttentionStoreAgent(LaneAgent):
    """Answers every task. Reads, writes and questions have a lane each: one that hangs stops no other."""

    def __init__(
        self,
        commands_address: str,
        results_address: str,
        *,
        rank: int,
        device_id: int = 0,
        dp_id: int = 0,
        splitwise_role: str = "mixed",
    ) -> None:
        """Connects to the engine at once, and starts its threads. Tasks before `connect` fail."""
        super().__init__(commands_address, results_address)
        self._rank = rank
        self._placement: dict[str, Any] = {"device_id": device_id, "dp_id": dp_id, "splitwise_role": splitwise_role}
        self._caches: DeviceCaches | None = None
        self._shared = SharedConnections(self._connected)
        self._first: Lease | None = None
        """Keeps the connection that `connect` made until the lanes have theirs."""
        self._reads = self._lane("load", self._read, lambda task, error: LoadDone(task.task_id, rank, 0, error=error))
        self._writes = self._lane(
            "store",
            self._write,
            lambda task, error: WriteDone(task.task_id, rank, 0, error=error),
            niceness=STORE_NICENESS,
        )
        self._index = self._lane("query", self._answer, self._not_answered)
        self._start(self._reads, self._writes, self._index)

    def connect(self, namespace: Namespace, caches: DeviceCaches) -> None:
        """The device tier has memory. Returns when the SDK can be used, which may take minutes.

        Raises `ConfigError` when the SDK is not installed, `StorageError` when it does not get ready.
        """
        self._caches = caches
        self._first = self._shared.open(namespace)

    def close(self) -> bool:
        closed = super().close()
        if self._first is not None:
            self._first.close()
        return closed

    def _lane(
        self, name: str, work: Callable[[Lease, Any], Any], on_error: Callable[[Any, str], Any], *, niceness: int = 0
    ) -> Lane:
        return Lane(
            f"kv-storage-{name}",
            open_backend=self._shared.open,
            work=work,
            on_error=on_error,
            results=self._results,
            niceness=niceness,
        )

    def _connected(self, namespace: Namespace) -> SdkConnection:
        if self._caches is None:
            raise StorageError("the device tier has no memory yet")
        identity = SdkIdentity.of(namespace, self._rank, **self._placement)
        return SdkConnection(load_sdk(), identity, self._caches)

    def _lanes_for(self, command: Any) -> Sequence[Lane]:
        if isinstance(command, UseNamespace):
            if self._first is not None and self._first.namespace != command.namespace:
                self._first.close()
            return self._lanes
        if isinstance(command, ReadStorageTask):
            return (self._reads,)
        if isinstance(command, WriteStorageTask) and command.flush_cache_exists is None:
            return (self._writes,)
        return () if self._rank else (self._index,)

    # ---- the lanes' work

    def _read(self, lease: Lease, task: ReadStorageTask) -> LoadDone:
        assert self._caches is not None
        for copy in self._caches.late_copies(task.gpu_block_ids):
            if not copy.wait_done(task.timeout):
                raise StorageError(f"a copy that was given up still fills a slot of {task.task_id}")
        start = time.monotonic()
        try:
            num_read = lease.sdk.read(task)
        except Exception as error:  # the edge to a foreign library
            quiet_after_s = _quiet_after_s(start, task.timeout)
            return LoadDone(task.task_id, self._rank, 0, error=_text(error), quiet_after_s=quiet_after_s)
        seconds = time.monotonic() - start
        self._caches.refilled(task.gpu_block_ids[:num_read])
        return LoadDone(task.task_id, self._rank, num_read, num_bytes=num_read * lease.sdk.block_bytes, seconds=seconds)

    def _write(self, lease: Lease, task: WriteStorageTask) -> WriteDone:
        start, first = time.monotonic(), task.start_write_block_idx
        num_stored = lease.sdk.match(task.token_ids) - first
        blocks = task.gpu_block_ids[max(0, num_stored) :]
        num_written = 0
        if num_stored >= 0 and blocks:  # else a block before them is missing, and they could not be found
            began = time.monotonic()
            try:
                num_written = lease.sdk.write(task.token_ids, first + num_stored, blocks, task.timeout)
            except Exception as error:  # the edge to a foreign library
                quiet_after_s = _quiet_after_s(began, task.timeout)
                return WriteDone(task.task_id, self._rank, 0, error=_text(error), quiet_after_s=quiet_after_s)
        return WriteDone(
            task.task_id,
            self._rank,
            num_written,
            num_bytes=num_written * lease.sdk.block_bytes,
            seconds=time.monotonic() - start,
            num_stored=min(max(0, num_stored) + num_written, len(task.gpu_block_ids)),
        )

    def _answer(self, lease: Lease, task: MatchTask | WriteStorageTask) -> QueryDone | FlushDone:
        start = time.monotonic()
        if isinstance(task, MatchTask):
            num_stored = max(0, lease.sdk.match(task.token_ids, task.timeout) - task.first_block_idx)
            return QueryDone(task.task_id, num_stored, time.monotonic() - start)
        lease.sdk.flush(task)
        return FlushDone(task.task_id, self._rank, 0, seconds=time.monotonic() - start)

    def _not_answered(self, task: MatchTask | WriteStorageTask, error: str) -> QueryDone | FlushDone:
        if isinstance(task, MatchTask):
            return QueryDone(task.task_id, 0, error=error)
        return FlushDone(task.task_id, self._rank, 0, error=error)


def _quiet_after_s(start: float, timeout: float) -> float:
    """A call that failed may still move bytes in the background, but not beyond the time that the SDK was given."""
    return max(0.0, start + timeout - time.monotonic()) + QUIET_MARGIN_S


def _text(error: Exception) -> str:
    if isinstance(error, KVCacheError):
        return str(error)
    logger.exception("the attention store's SDK failed")
    return repr(error)
