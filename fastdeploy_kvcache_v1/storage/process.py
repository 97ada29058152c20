"""StoreProcess: the engine's end of the process that moves blocks between the host tier of all ranks and a store.

    waiting ---- memory of all ranks, a namespace ----> starting -- Ready --> serving
    starting, serving -- no answer in time, or a change of memory: SIGKILL --> dying
    starting, serving -- it ends --> dying -- its pidfd says so --> resting, or waiting -- pause --> starting

Only then what is under way is answered with an error, and its slots may be used for others: no byte arrives any more.
A store may start further processes that map the memory: the end of a pipe that all of them hold says that they have
ended, too.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from io import FileIO
from typing import Any, NamedTuple, Protocol

import msgspec

from ..contract.messages import BlockHash
from ..errors import KVCacheError
from ..forks import closed_in_children, opening
from ..link.messages import decoders_of, encode
from ..link.peer import Peer, Waker, socket_pair
from .messages import (
    Ending,
    LoadBlocks,
    LoadDone,
    MappedSlots,
    QueryBlocks,
    QueryDone,
    RanksDiffer,
    Ready,
    Start,
    StoreBlocks,
    StoreDone,
    TouchBlocks,
    TouchDone,
    UseNamespace,
)
from .namespace import Namespace
from .parts import Parts
from .settings import StorageSettings

__all__ = ["Limits", "StoreProcess"]

logger = logging.getLogger(__name__)

Answer = QueryDone | LoadDone | StoreDone | TouchDone

LANES = {
    QueryBlocks: "query",
    TouchBlocks: "query",
    LoadBlocks: "load",
    StoreBlocks: "store",
    QueryDone: "query",
    TouchDone: "query",
    LoadDone: "load",
    StoreDone: "store",
}
"""Of the process: who does a command, and whose an answer is. Each lane answers in order."""

TYPES = decoders_of((Ready, Ending, RanksDiffer, QueryDone, LoadDone, StoreDone, TouchDone))

STOP_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Limits:
    """How long the process is waited for, and how long another one is not started."""

    answer_s: float = 10.0
    bytes_per_s: float = 10e6
    """Added to `answer_s` of a load or a store: the slowest disk that is worth it."""
    start_s: float = 60.0
    start_bytes_per_s: float = 500e6
    """Added to `start_s` for the whole host tier: RDMA pins it."""
    first_pause_s: float = 1.0
    longest_pause_s: float = 60.0


class File(Protocol):
    """An open file, as `io.FileIO`."""

    def fileno(self) -> int: ...
    def close(self) -> None: ...


class _Memory(NamedTuple):
    """Of one rank."""

    file: File
    num_slots: int
    slot_bytes: int


@dataclass(eq=False)
class Lane:
    """Commands that a lane of the process has not answered, in order."""

    commands: deque[tuple[Any, float]] = field(default_factory=deque)
    """Each with the seconds that it may take, from when it is the first one."""
    since: float = 0.0
    """When the first one became that."""

    def add(self, command: Any, limit_s: float, *, now: float) -> None:
        if not self.commands:
            self.since = now
        self.commands.append((command, limit_s))

    def answered(self, *, now: float) -> Any:
        self.since = now
        return self.commands.popleft()[0]

    @property
    def deadline(self) -> float | None:
        return self.since + self.commands[0][1] if self.commands else None


class _Child:
    """A process, from its start to the proof of its end."""

    def __init__(self, popen: subprocess.Popen[bytes], peer: Peer, pidfd: int, life: FileIO) -> None:
        self.popen = popen
        self.peer = peer
        self.pidfd = pidfd
        self.life = life
        self.is_dead = False
        """It has ended; what it has started may run still."""
        self.lanes = {name: Lane() for name in ("query", "load", "store")}
        self.ending: str | None = None
        """Why it ends, once that is known. It is asked for nothing more."""
        self.is_wanted = True
        """False: it ends because it must, not because it failed."""

    @property
    def is_opening(self) -> bool:
        return any(isinstance(each, UseNamespace) for lane in self.lanes.values() for each, _ in lane.commands)

    def send(self, message: object) -> None:
        """Its end is told by its pidfd."""
        self.peer.outbox.put(encode(message))
        self.peer.flush()

    def kill(self, reason: str) -> None:
        if self.ending is None:
            self.ending = reason
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)  # what it has started

    def close(self) -> None:
        """After its end."""
        self.peer.close()
        self.life.close()
        os.close(self.pidfd)
        self.popen.wait()  # at once, even if another part of the program has taken its status


class StoreProcess:
    """A `Link` to a store over the host tier. Any thread may call it; nothing blocks, except `close`.

    A thread starts the process, which dies with that thread, and hears its answers.
    """

    def __init__(self, settings: StorageSettings, parts: Parts, *, limits: Limits = Limits()) -> None:
        """Starts the process when every rank has memory, and a namespace is named."""
        self.num_ranks = parts.num_ranks
        self.is_serving = False
        """False: what is sent now is answered at once, with an error."""
        self._settings = settings
        self._parts = parts
        self._limits = limits
        self._on_answer: Callable[[Answer], None] = lambda answer: None
        self._memories: dict[int, _Memory] = {}
        self._released: list[Callable[[], object]] = []
        """Told once nothing maps memory that was dropped."""
        self._namespace: Namespace | None = None
        self._child: _Child | None = None
        self._away = "the store process has not started"
        """Why nothing can be asked."""
        self._is_accompanied = False
        self._pause_s = 0.0
        self._start_at = 0.0
        self._stop_by: float | None = None
        self._inbox: deque[Callable[[], None]] = deque()
        self._waker = Waker()
        self._thread = threading.Thread(target=self._run, name="kv-store", daemon=True)
        self._thread.start()

    # ---- any thread

    def listen(self, on_answer: Callable[[Answer], None]) -> None:
        """Deliver answers, on a thread of this object. Before the first command."""
        self._on_answer = on_answer

    @property
    def pid(self) -> int | None:
        """None while there is no process."""
        child = self._child
        return None if child is None else child.popen.pid

    def use_memory(self, rank: int, file: File, num_slots: int, slot_bytes: int) -> None:
        """The host tier of `rank` is `file` from here on, which this object closes. Earlier memory was dropped."""
        memory = _Memory(closed_in_children(file), num_slots, slot_bytes)
        self._post(lambda: self._use_memory(rank, memory))

    def drop_memory(self, rank: int, released: Callable[[], object] = lambda: None) -> None:
        """The host tier of `rank` is about to lose its memory. `released` is called when no other process maps it.

        Before a store is asked for in new memory, `StorageTier.cache_reset` must have forgotten what was in this one.
        """
        self.is_serving = False
        self._post(lambda: self._drop(rank, released))

    def use_namespace(self, namespace: Namespace) -> None:
        """What is asked from here on is about blocks of `namespace`."""
        self._post(lambda: self._use(namespace))

    def query(self, query_id: str, hashes: Sequence[BlockHash]) -> None:
        self._submit(QueryBlocks(query_id, tuple(hashes)))

    def load(self, load_id: str, hashes: Sequence[BlockHash], slots: Sequence[int]) -> None:
        self._submit(LoadBlocks(load_id, tuple(hashes), tuple(slots)))

    def store(self, store_id: str, hashes: Sequence[BlockHash], slots: Sequence[int]) -> None:
        self._submit(StoreBlocks(store_id, tuple(hashes), tuple(slots)))

    def touch(self, touch_id: str, hashes: Sequence[BlockHash]) -> None:
        self._submit(TouchBlocks(touch_id, tuple(hashes)))

    def close(self) -> None:
        """What is moved ends within 2 s, or is ended. No answer comes afterwards. Idempotent."""
        self._post(self._stop)
        self._thread.join(2 * STOP_TIMEOUT_S)  # a process that hangs in the kernel ends later

    def _submit(self, command: Any) -> None:
        self._post(lambda: self._do(command))

    def _post(self, act: Callable[[], None]) -> None:
        self._inbox.append(act)
        self._waker.wake()

    # ---- the thread

    def _run(self) -> None:
        selector = selectors.DefaultSelector()
        while True:
            while self._inbox:
                self._inbox.popleft()()
            if self._child is not None:
                self._look_at(self._child)
            elif self._stop_by is not None:
                break
            else:
                self._start_if_due()
            self._wait(selector)
        for memory in self._memories.values():
            memory.file.close()
        self._waker.close()

    def _wait(self, selector: selectors.BaseSelector) -> None:
        """Until something happens, or a deadline has passed."""
        child = self._child
        selector.register(self._waker.receiver, selectors.EVENT_READ)
        if child is not None:
            selector.register(child.life if child.is_dead else child.pidfd, selectors.EVENT_READ)
            if child.ending is None:
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if child.peer.outbox else 0)
                selector.register(child.peer.socket, events)
        deadline = self._next_deadline()
        ready = selector.select(None if deadline is None else max(0.0, deadline - time.monotonic()))
        for key in list(selector.get_map().values()):
            selector.unregister(key.fileobj)
        self._waker.clear()
        if child is not None and ready:
            self._hear(child, {key.fileobj for key, _ in ready})

    def _next_deadline(self) -> float | None:
        if self._child is None:
            return self._start_at if self._can_start else None
        if self._child.ending is not None:
            return None
        deadlines = [self._stop_by, *(lane.deadline for lane in self._child.lanes.values())]
        return min((each for each in deadlines if each is not None), default=None)

    @property
    def _can_start(self) -> bool:
        return len(self._memories) == self.num_ranks and self._namespace is not None

    def _start_if_due(self) -> None:
        if self._can_start and time.monotonic() >= self._start_at:
            try:
                self._start()
            except (OSError, KVCacheError) as error:
                self._failed(f"cannot be started: {error}")

    def _start(self) -> None:
        assert self._namespace is not None
        memories = [self._memories[rank] for rank in range(self.num_ranks)]
        if self._settings.kind.beside is not None and not self._is_accompanied:
            self._is_accompanied = True
            self._settings.kind.beside(self._settings, self.num_ranks)
        mapped = tuple(MappedSlots(each.file.fileno(), each.num_slots, each.slot_bytes) for each in memories)
        with opening:
            ours, theirs = socket_pair()
            life, lives = map(closed_in_children, map(FileIO, os.pipe(), "rw"))
        peer = Peer(lambda: ours, TYPES)
        settings = msgspec.to_builtins(self._settings, enc_hook=str)
        start = Start(settings, self._parts.num_parts, mapped, lives.fileno())
        with theirs, lives:
            try:
                popen = subprocess.Popen(
                    [sys.executable, "-m", f"{__package__}.child", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno(), lives.fileno(), *(each.file for each in mapped)],
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                    start_new_session=True,  # Ctrl-C is for who serves
                )
            except OSError:
                peer.close()
                life.close()
                raise
        self._child = child = _Child(popen, peer, os.pidfd_open(popen.pid), life)
        child.send(start)
        self._name(child, self._namespace)

    def _name(self, child: _Child, namespace: Namespace) -> None:
        self.is_serving = False
        num_bytes = sum(each.num_slots * each.slot_bytes for each in self._memories.values())
        limit_s = self._limits.start_s + num_bytes / self._limits.start_bytes_per_s
        self._send(child, UseNamespace(namespace), limit_s, *child.lanes.values())

    def _send(self, child: _Child, command: Any, limit_s: float, *lanes: Lane) -> None:
        for lane in lanes:
            lane.add(command, limit_s, now=time.monotonic())
        child.send(command)

    def _do(self, command: Any) -> None:
        child = self._child
        if child is None or child.ending is not None or self._stop_by is not None:
            ending = None if child is None else child.ending
            self._tell(command.failed(self._away if ending is None else f"the store process was lost: {ending}"))
            return
        num_bytes = 0
        if isinstance(command, LoadBlocks | StoreBlocks):
            memory = self._memories[0]
            num_bytes = len(command.slots) * memory.slot_bytes * self._parts.num_parts
        limit_s = self._limits.answer_s + num_bytes / self._limits.bytes_per_s
        self._send(child, command, limit_s, child.lanes[LANES[type(command)]])

    def _use(self, namespace: Namespace) -> None:
        self._namespace = namespace
        if self._child is not None and self._child.ending is None:
            self._name(self._child, namespace)

    def _use_memory(self, rank: int, memory: _Memory) -> None:
        if rank in self._memories:  # a process maps the earlier one
            self._drop(rank, lambda: None)
        self._memories[rank] = memory

    def _drop(self, rank: int, released: Callable[[], object]) -> None:
        memory = self._memories.pop(rank, None)
        if memory is not None:
            memory.file.close()
        self._away = "the host tier has lost its memory"
        self._released.append(released)
        if self._child is None:
            self._release()
        else:
            self._end(self._child, self._away)

    def _end(self, child: _Child, reason: str) -> None:
        """End a process that has not failed."""
        child.is_wanted = False
        child.kill(reason)

    def _release(self) -> None:
        told, self._released = self._released, []
        for each in told:
            each()

    def _stop(self) -> None:
        if self._stop_by is None:
            self._stop_by = time.monotonic() + STOP_TIMEOUT_S
            self.is_serving = False
            self._on_answer = lambda answer: None

    def _look_at(self, child: _Child) -> None:
        """End a process that is late, or has nothing left to do."""
        now = time.monotonic()
        is_idle = not any(lane.commands for lane in child.lanes.values())
        if self._stop_by is not None and (is_idle or child.is_opening or now >= self._stop_by):
            self._end(child, "the server stops")
        for name, lane in child.lanes.items():
            if child.ending is None and lane.deadline is not None and now >= lane.deadline:
                command, limit_s = lane.commands[0]
                what = "start" if isinstance(command, UseNamespace) else name
                child.kill(f"no answer to a {what} in {limit_s:.0f} s")
        self.is_serving &= child.ending is None

    def _hear(self, child: _Child, ready: set[Any]) -> None:
        if child.life in ready:  # nobody writes to it: this is its end
            self._over(child)
        if child.is_dead:
            return
        is_over = child.pidfd in ready
        child.peer.flush()
        try:
            if is_over or child.peer.socket in ready:
                child.peer.receive()
                for message in child.peer.messages():  # what was answered before the end has happened
                    self._take(child, message)
        except EOFError:
            child.kill("it has ended")
        except (ValueError, LookupError) as error:
            child.kill(f"it says what it must not: {error}")
        if is_over:
            child.kill("it has ended")
            child.is_dead = True

    def _take(self, child: _Child, message: Any) -> None:
        if isinstance(message, Ending):
            child.kill(message.reason)
        elif isinstance(message, RanksDiffer):
            logger.warning("tensor parallel ranks hold different bytes of a block: each stores a part of its own")
            self._parts = self._parts.each_rank
            self._end(child, "ranks hold different bytes")
        else:
            lane = child.lanes[message.lane if isinstance(message, Ready) else LANES[type(message)]]
            lane.answered(now=time.monotonic())
            if isinstance(message, Ready):
                self.is_serving = not child.is_opening and self._stop_by is None
                return
            if isinstance(message, LoadDone | StoreDone) and message.error is None and self._pause_s:
                logger.warning("the store process works again")
                self._pause_s = 0.0
            self._tell(message)

    def _over(self, child: _Child) -> None:
        """The process has ended, and every byte that it moved."""
        reason = child.ending or "it has ended"
        self.is_serving = False
        self._child = None
        child.close()
        if child.is_wanted:
            self._failed(reason)
        for lane in child.lanes.values():
            for command, _ in lane.commands:
                if not isinstance(command, UseNamespace):
                    self._tell(command.failed(f"the store process was lost: {reason}"))
        self._release()

    def _failed(self, reason: str) -> None:
        limits = self._limits
        self._pause_s = min(max(limits.first_pause_s, 2 * self._pause_s), limits.longest_pause_s)
        self._start_at = time.monotonic() + self._pause_s
        self._away = f"the store process was lost: {reason}"
        logger.warning("%s; another one starts in %.0f s", self._away, self._pause_s)

    def _tell(self, answer: Answer) -> None:
        self._on_answer(answer)
