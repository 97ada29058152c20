"""AttentionStoreAgent: a worker rank's threads that call the SDK, which moves blocks from and to the device tier.

The engine sends a task only when every copy and pass that it told the workers before has been reported, so the slots
are quiet. What it cannot know is a copy that was given up and still runs, and the fill of new tensors: the agent waits
for those.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ...errors import KVCacheError, StorageError
from ..messages import Connect, Connected, LoadDone, QueryDone, UseNamespace
from ..namespace import Namespace
from .connections import Lease, SharedConnections
from .lane import Lane
from .lane_agent import STOP_TIMEOUT_S, LaneAgent
from .sdk import DeviceCaches, SdkConnection, SdkIdentity, load_sdk
from .tasks import COMMANDS, FlushDone, MatchTask, ReadStorageTask, WriteDone, WriteStorageTask

__all__ = ["AttentionStoreAgent"]

logger = logging.getLogger(__name__)

STORE_NICENESS = 10
"""Of the thread that stores: it gives way to whatever serves requests."""

QUIET_MARGIN_S = 1.0
"""Added to the time that the SDK was given for a call: clocks, and the last bytes on their way."""


@dataclass(frozen=True)
class _Memory:
    """Of the device tier."""

    caches: DeviceCaches
    since: float


class AttentionStoreAgent(LaneAgent):
    """Answers every task. Reads, writes and questions have a lane each: one that hangs stops no other."""

    COMMANDS = COMMANDS

    def __init__(
        self,
        answer: Callable[[Any], None],
        *,
        rank: int,
        placement: Mapping[str, Any] = MappingProxyType({}),
        on_gpu: bool = False,
        enter_thread: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts its threads, in each of which `enter_thread` is called before the SDK is. Reads and writes before
        `use` fail. `answer` sends to the engine. `placement`: further arguments of `SdkIdentity.of`.
        """
        super().__init__(answer)
        self._rank = rank
        self._placement = placement
        self._on_gpu = on_gpu
        self._enter_thread = enter_thread
        self._memory: _Memory | None = None
        self._may_move_until = 0.0
        """Calls that have failed may read and write the device tier until then."""
        self._shared = SharedConnections(self._connected)
        self._first: Lease | None = None
        """Keeps the connection that `connect` made until the lanes have theirs."""
        self._reads = self._lane("load", self._read, lambda task, error: LoadDone(task.task_id, 0, error=error))
        self._writes = self._lane(
            "store",
            self._write,
            lambda task, error: WriteDone(task.task_id, 0, error=error),
            niceness=STORE_NICENESS,
        )
        self._index = self._lane("query", self._look_up, self._not_answered)
        self._lanes = self._reads, self._writes, self._index

    def connect(self, namespace: Namespace) -> None:
        """Returns when the SDK can be used, which may take minutes.

        Raises `ConfigError` when the SDK is not installed, `StorageError` when it does not get ready.
        """
        self._first = self._shared.open(namespace)

    def use(self, caches: DeviceCaches) -> None:
        """From here on the device tier is this one. What was reserved in an earlier one is not moved any more."""
        self._memory = _Memory(caches, time.monotonic())

    def let_go(self) -> None:
        """The device tier is about to lose its memory. Waits for what is being moved, but not long: while the SDK may
        still touch the memory, its owner is kept.
        """
        memory, self._memory = self._memory, None
        deadline = time.monotonic() + STOP_TIMEOUT_S
        is_quiet = all(lane.settle(deadline) for lane in (self._reads, self._writes))
        if memory is not None and not (is_quiet and self._may_move_until <= time.monotonic()):
            logger.warning("memory of the device tier is kept: the attention store may still use it")
            threading.Thread(target=self._keep, args=(memory,), name="kv-storage-keep", daemon=True).start()

    def _keep(self, memory: _Memory) -> None:
        for lane in (self._reads, self._writes):
            lane.settle()
        time.sleep(max(0.0, self._may_move_until - time.monotonic()))
        logger.info("the attention store no longer uses memory of the earlier device tier")
        del memory

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
            open_backend=self._open,
            work=work,
            on_error=on_error,
            answer=self._answer,
            niceness=niceness,
        )

    def _open(self, namespace: Namespace) -> Lease:
        self._enter_thread()
        return self._shared.open(namespace)

    def _connected(self, namespace: Namespace) -> SdkConnection:
        identity = SdkIdentity.of(namespace, self._rank, **self._placement)
        return SdkConnection(load_sdk(), identity, on_gpu=self._on_gpu)

    def _lanes_for(self, command: Any) -> Sequence[Lane]:
        if isinstance(command, UseNamespace):
            if self._first is not None and self._first.namespace != command.namespace:
                self._first.close()
            return self._lanes
        if isinstance(command, Connect):
            return (self._index,)
        if isinstance(command, ReadStorageTask):
            return (self._reads,)
        if isinstance(command, WriteStorageTask) and command.flush_cache_exists is None:
            return (self._writes,)
        return () if self._rank else (self._index,)

    # ---- the lanes' work

    def _read(self, lease: Lease, task: ReadStorageTask) -> LoadDone:
        caches = self._caches_of(task)
        start = time.monotonic()
        try:
            num_read = lease.sdk.read(task, caches)
        except Exception as error:  # the edge to a foreign library
            quiet_after_s = self._quiet_after_s(start, task.timeout)
            return LoadDone(task.task_id, 0, error=_text(error), quiet_after_s=quiet_after_s)
        seconds = time.monotonic() - start
        caches.refilled(task.gpu_block_ids[:num_read])
        num_bytes = num_read * lease.sdk.block_bytes
        return LoadDone(task.task_id, num_read, num_bytes=num_bytes, seconds=seconds)

    def _write(self, lease: Lease, task: WriteStorageTask) -> WriteDone:
        caches = self._caches_of(task)
        start, first = time.monotonic(), task.start_write_block_idx
        num_stored = lease.sdk.match(task.token_ids) - first
        blocks = task.gpu_block_ids[max(0, num_stored) :]
        num_written = 0
        if num_stored >= 0 and blocks:  # else a block before them is missing, and they could not be found
            began = time.monotonic()
            try:
                num_written = lease.sdk.write(task.token_ids, first + num_stored, blocks, task.timeout, caches)
            except Exception as error:  # the edge to a foreign library
                quiet_after_s = self._quiet_after_s(began, task.timeout)
                return WriteDone(task.task_id, 0, error=_text(error), quiet_after_s=quiet_after_s)
        return WriteDone(
            task.task_id,
            num_written,
            num_bytes=num_written * lease.sdk.block_bytes,
            seconds=time.monotonic() - start,
            num_stored=min(max(0, num_stored) + num_written, len(task.gpu_block_ids)),
        )

    def _look_up(self, lease: Lease, task: Connect | MatchTask | WriteStorageTask) -> Connected | QueryDone | FlushDone:
        start = time.monotonic()
        if isinstance(task, Connect):
            return Connected(self._rank)
        if isinstance(task, MatchTask):
            num_stored = max(0, lease.sdk.match(task.token_ids, task.timeout) - task.first_block_idx)
            return QueryDone(task.task_id, num_stored, time.monotonic() - start)
        lease.sdk.flush(task)
        return FlushDone(task.task_id, 0, seconds=time.monotonic() - start)

    def _not_answered(
        self, task: Connect | MatchTask | WriteStorageTask, error: str
    ) -> Connected | QueryDone | FlushDone:
        if isinstance(task, Connect):
            return Connected(self._rank, error=error)
        if isinstance(task, MatchTask):
            return QueryDone(task.task_id, 0, error=error)
        return FlushDone(task.task_id, 0, error=error)

    def _caches_of(self, task: ReadStorageTask | WriteStorageTask) -> DeviceCaches:
        memory = self._memory
        if memory is None:
            raise StorageError("the device tier has no memory now")
        if task.begun_at < memory.since:
            raise StorageError("the device tier was made anew since the blocks were reserved")
        for late in memory.caches.late_writes(task.gpu_block_ids):
            if not late.wait_done(task.timeout):
                raise StorageError(
                    f"slots of {task.task_id} are still written by a copy that was given up or the fill of new tensors"
                )
        return memory.caches

    def _quiet_after_s(self, start: float, timeout: float) -> float:
        """A call that failed may still move bytes in the background, but not beyond the time that the SDK was given."""
        now = time.monotonic()
        until = max(now, start + timeout) + QUIET_MARGIN_S
        self._may_move_until = max(self._may_move_until, until)
        return until - now


def _text(error: Exception) -> str:
    if isinstance(error, KVCacheError):
        return str(error)
    logger.exception("the attention store's SDK failed")
    return repr(error)
