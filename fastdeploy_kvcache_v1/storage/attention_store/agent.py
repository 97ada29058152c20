"""AttentionStoreAgent: a worker rank's threads that call the SDK, which moves blocks from and to the device tier.

The engine sends a task only when every copy and pass that it told the workers before has been reported, so the slots
are quiet. What it cannot know is a copy that was given up and still runs, and the fill of new tensors: the agent waits
for those. An answer says that no byte of the task moves any more.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from weakref import WeakValueDictionary

from ...errors import KVCacheError, StorageError
from ..messages import Connect, Connected, Failing, LoadDone, QueryDone, UseNamespace
from ..namespace import Namespace
from .lane import Lane
from .sdk import DeviceCaches, SdkConnection, SdkIdentity, load_sdk
from .tasks import COMMANDS, FlushDone, MatchTask, ReadStorageTask, WriteDone, WriteStorageTask

__all__ = ["AttentionStoreAgent"]

logger = logging.getLogger(__name__)

STORE_NICENESS = 10
"""Of the thread that stores: it gives way to whatever serves requests."""

STOP_TIMEOUT_S = 2.0

QUIET_MARGIN_S = 1.0
"""Added to the time that the SDK was given for a call: clocks, and the last bytes on their way."""


@dataclass(frozen=True)
class _Memory:
    """Of the device tier."""

    caches: DeviceCaches
    since: float


class AttentionStoreAgent:
    """A worker rank's end of a `StorageLink`. Answers every task, and tasks of one kind in order of arrival unless they
    fail. Reads, writes and questions have a lane each: one that hangs stops no other.
    """

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
        self._answer = answer
        self._rank = rank
        self._placement = placement
        self._on_gpu = on_gpu
        self._enter_thread = enter_thread
        self._memory: _Memory | None = None
        self._late: dict[int, DeviceCaches] = {}
        """Memory of calls that have failed and are not answered yet."""
        self._numbers = itertools.count()
        self._connecting = threading.Lock()
        self._connections: WeakValueDictionary[str, SdkConnection] = WeakValueDictionary()
        """By digest of the namespace. An instance of the SDK stands for a shard of a model on a device: two would be
        two of them. The SDK has no call that closes one.
        """
        self._first: SdkConnection | None = None
        """What `connect` made, until the lanes use it or the namespace is another one."""
        self._reads = self._lane("load", self._read, lambda task, error: LoadDone(task.task_id, 0, error=error))
        self._writes = self._lane(
            "store",
            self._write,
            lambda task, error: WriteDone(task.task_id, 0, error=error),
            niceness=STORE_NICENESS,
        )
        self._index = self._lane("query", self._look_up, self._not_answered)
        self._lanes = self._reads, self._writes, self._index
        self.handlers: Mapping[type, Callable[[Any], None]] = dict.fromkeys(COMMANDS, self._hear)
        """Of commands, for `RankLink.listen`. Any thread; they do not block."""

    def connect(self, namespace: Namespace) -> None:
        """Returns when the SDK can be used, which may take minutes.

        Raises `ConfigError` when the SDK is not installed, `StorageError` when it does not get ready.
        """
        self._first = self._connected(namespace)

    def use(self, caches: DeviceCaches) -> None:
        """From here on the device tier is this one. What was reserved in an earlier one is not moved any more."""
        self._memory = _Memory(caches, time.monotonic())

    def let_go(self) -> None:
        """The device tier is about to lose its memory. Waits for what is being moved, but not long: while the SDK may
        still touch the memory, its owner is kept.
        """
        self._memory = None
        deadline = time.monotonic() + STOP_TIMEOUT_S
        if not all(lane.settle(deadline) for lane in (self._reads, self._writes)) or self._late:
            logger.warning("memory of the device tier is kept: the attention store may still use it")

    def close(self) -> bool:
        """Waits for what is being moved, but not long, and drops the rest. May be called again.

        False if the store may still read and fill slots, so their memory must stay.
        """
        deadline = time.monotonic() + STOP_TIMEOUT_S
        hanging = [lane.name for lane in self._lanes if not lane.close(deadline)]
        if hanging:
            logger.warning("%s did not end: the store hangs", " and ".join(hanging))
        self._first = None
        return not hanging and not self._late

    def _lane(
        self, name: str, work: Callable[[Any, Any], Any], on_error: Callable[[Any, str], Any], *, niceness: int = 0
    ) -> Lane:
        return Lane(
            f"kv-storage-{name}",
            connect=self._open,
            work=work,
            on_error=on_error,
            answer=self._answer,
            niceness=niceness,
        )

    def _open(self, namespace: Namespace) -> SdkConnection:
        self._enter_thread()
        return self._connected(namespace)

    def _connected(self, namespace: Namespace) -> SdkConnection:
        """Raises what connecting raises. Other threads that connect wait meanwhile."""
        with self._connecting:
            sdk = self._connections.get(namespace.digest)
            if sdk is None:
                identity = SdkIdentity.of(namespace, self._rank, **self._placement)
                sdk = self._connections[namespace.digest] = SdkConnection(load_sdk(), identity, on_gpu=self._on_gpu)
            return sdk

    def _hear(self, command: Any) -> None:
        if isinstance(command, UseNamespace):
            if self._first is not self._connections.get(command.namespace.digest):
                self._first = None
            lanes: Sequence[Lane] = self._lanes
        elif isinstance(command, ReadStorageTask):
            lanes = (self._reads,)
        elif isinstance(command, WriteStorageTask) and command.flush_cache_exists is None:
            lanes = (self._writes,)
        else:
            lanes = () if self._rank and not isinstance(command, Connect) else (self._index,)
        for lane in lanes:
            lane.do(command)

    # ---- the lanes' work

    def _read(self, sdk: SdkConnection, task: ReadStorageTask) -> LoadDone | None:
        caches = self._caches_of(task)
        start = time.monotonic()
        try:
            num_read = sdk.read(task, caches)
        except Exception as error:  # the edge to a foreign library
            text = _text(error)
            self._answer(Failing(task.task_id, text))
            self._later(LoadDone(task.task_id, 0, error=text), caches, start + task.timeout)
            return None
        seconds = time.monotonic() - start
        caches.refilled(task.gpu_block_ids[:num_read])
        return LoadDone(task.task_id, num_read, num_bytes=num_read * sdk.block_bytes, seconds=seconds)

    def _write(self, sdk: SdkConnection, task: WriteStorageTask) -> WriteDone | None:
        caches = self._caches_of(task)
        start, first = time.monotonic(), task.start_write_block_idx
        num_stored = 0 if task.is_continued else sdk.match(task.token_ids) - first
        blocks = task.gpu_block_ids[max(0, num_stored) :]
        num_written = 0
        if num_stored >= 0 and blocks:  # else a block before them is missing, and they could not be found
            began, end = time.monotonic(), first + len(task.gpu_block_ids)
            path = task.token_ids[: end * sdk.identity.block_token_size]
            try:
                num_written = sdk.write(path, first + num_stored, blocks, task.timeout, caches)
            except Exception as error:  # the edge to a foreign library
                self._later(WriteDone(task.task_id, 0, error=_text(error)), caches, began + task.timeout)
                return None
        return WriteDone(
            task.task_id,
            num_written,
            num_bytes=num_written * sdk.block_bytes,
            seconds=time.monotonic() - start,
            num_stored=max(0, num_stored) + num_written,
        )

    def _look_up(self, sdk: SdkConnection, task: Connect | MatchTask | WriteStorageTask) -> Any:
        start = time.monotonic()
        if isinstance(task, Connect):
            return Connected(self._rank)
        if isinstance(task, MatchTask):
            num_stored = max(0, sdk.match(task.token_ids, task.timeout) - task.first_block_idx)
            return QueryDone(task.task_id, num_stored, time.monotonic() - start)
        sdk.flush(task)
        return FlushDone(task.task_id, 0, seconds=time.monotonic() - start)

    def _not_answered(self, task: Connect | MatchTask | WriteStorageTask, error: str) -> Any:
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

    def _later(self, answer: Any, caches: DeviceCaches, until: float) -> None:
        """A call that failed may still move bytes in the background, but not beyond the time that the SDK was given:
        its `answer` waits.
        """
        number = next(self._numbers)
        self._late[number] = caches

        def send() -> None:
            del self._late[number]
            self._answer(answer)

        timer = threading.Timer(max(0.0, until - time.monotonic()) + QUIET_MARGIN_S, send)
        timer.daemon = True
        timer.start()


def _text(error: Exception) -> str:
    if isinstance(error, KVCacheError):
        return str(error)
    logger.exception("the attention store's SDK failed")
    return repr(error)
