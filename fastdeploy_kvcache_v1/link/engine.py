"""EngineLink: the engine's end of the connections to its worker ranks."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..forks import closed_in_children, opening
from .messages import Hello, Memory, MessageTypes, Welcome, encode
from .peer import Peer, Waker
from .place import make_private

logger = logging.getLogger(__name__)

HELLO_S = 10.0
"""Wait for the `Hello` of a new connection."""

MAX_MESSAGES_PER_S = 20_000
"""Of one rank: it is closed as one that floods. A rank has news of each pass, and answers to what it is asked."""


MAX_LOGGED = 100
"""Different lines about connections."""


@dataclass(eq=False)
class _Connected:
    peer: Peer
    since: float
    rank: int | None = None
    """None before its `Hello`."""
    pid: int = 0
    count_since: float = 0.0
    num_messages: int = 0
    """Since `count_since`."""


class EngineLink:
    """Thread-safe. Ranks connect in any order and at any time; one that misbehaves is closed, the others go on.

    A connection lasts as long as its rank and this engine live, and loses nothing meanwhile: its end is the event that
    the rank is gone.
    """

    def __init__(
        self,
        path: Path,
        num_ranks: int,
        types: MessageTypes,
        *,
        word: str,
        log: logging.Logger = logger,
    ) -> None:
        """Listens at `path`, in a directory that it makes. A socket that a killed engine left there is removed.

        `word`: see `Hello`. Ranks that another engine left behind have another word. Raises `ConfigError`.
        """
        self.num_ranks = num_ranks
        self._types = types
        self._word = word
        self._log = log
        self._lock = threading.Lock()
        """Of sending, and of `_ranks`."""
        self._ranks: dict[int, _Connected] = {}
        self._connected: set[_Connected] = set()
        self._logged: set[str] = set()
        """A rank that is refused tries again and again."""
        self._handlers: Mapping[type, Callable[[int, Any], None]] = {}
        self._on_gone: Callable[[int], None] = lambda rank: None
        self._closing = False
        self.path = path
        self._listener = _listen(path)
        self._inode = path.lstat().st_ino
        self._waker = Waker()
        with opening:
            self._selector = closed_in_children(selectors.DefaultSelector())
        self._thread: threading.Thread | None = None

    def listen(self, handlers: Mapping[type, Callable[[int, Any], None]], on_gone: Callable[[int], None]) -> None:
        """Deliver what ranks say, in order, on a thread of the link, which must not wait. Once.

        `handlers` by type, which may grow, take rank and message. A message without one is dropped. The first message
        of a rank is its `Hello`; when its connection has ended, `on_gone` is called.
        """
        self._handlers, self._on_gone = handlers, on_gone
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._waker.receiver, selectors.EVENT_READ, self._woken)
        self._thread = threading.Thread(target=self._run, name="kv-link", daemon=True)
        self._thread.start()

    @property
    def is_complete(self) -> bool:
        """Every rank is connected."""
        return len(self._ranks) == self.num_ranks

    def send(self, message: object, rank: int | None = None) -> Sequence[int]:
        """To `rank`, or to every rank, without waiting. Returns those that are not connected: they do not get it."""
        body, absent, waits = encode(message), [], False
        with self._lock:
            for each in range(self.num_ranks) if rank is None else (rank,):
                if (connected := self._ranks.get(each)) is None:
                    absent.append(each)
                    continue
                outbox = connected.peer.outbox
                outbox.put(body)
                connected.peer.flush()
                waits = waits or bool(outbox) or outbox.is_overfull
        if waits:
            self._waker.wake()
        return absent

    def close(self) -> None:
        """Close all connections, and remove the socket. Nothing is delivered afterwards. Idempotent."""
        self._closing = True
        self._waker.wake()
        if self._thread is not None:
            self._thread.join()
        for connected in list(self._connected):
            self._forget(connected)
        self._selector.close()
        self._listener.close()
        self._waker.close()
        with contextlib.suppress(OSError):  # gone already, or not empty
            if self.path.lstat().st_ino == self._inode:  # else of an engine that has taken the path
                self.path.unlink()
                self.path.parent.rmdir()

    # ---- the thread

    def _run(self) -> None:
        while not self._closing:
            timeout = HELLO_S if len(self._connected) > len(self._ranks) else None
            for key, events in self._selector.select(timeout):
                if not self._closing:
                    key.data(events)
            self._drop_silent()

    def _accept(self, events: int) -> None:
        try:
            peer = Peer(lambda: self._listener.accept()[0], self._types.to_engine)
        except BlockingIOError:
            return
        except OSError as error:
            self._log_once(f"a worker rank cannot connect: {error}")
            time.sleep(0.01)  # too many open files, for example: it stays readable
            return
        connected = _Connected(peer, time.monotonic())
        self._connected.add(connected)
        self._selector.register(peer.socket, selectors.EVENT_READ, lambda events: self._ready(connected, events))

    def _woken(self, events: int) -> None:
        self._waker.clear()
        for connected in list(self._ranks.values()):
            self._flush(connected)

    def _ready(self, connected: _Connected, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush(connected)
        if not events & selectors.EVENT_READ or connected not in self._connected:
            return
        try:
            connected.peer.receive()
            for message in connected.peer.messages():
                self._take(connected, message)
        except EOFError:
            self._drop(connected)
        except ValueError as error:
            self._drop(connected, str(error))
        except Exception:  # the edge of the thread: without this message the rank counts as gone
            self._log.exception("worker rank %s is closed, because its message failed", connected.rank)
            self._drop(connected)

    def _take(self, connected: _Connected, message: Any) -> None:
        if connected.rank is None:
            self._welcome(connected, message)
        elif isinstance(message, Hello):
            raise ValueError("got a second Hello")
        elif not self._closing:
            now = time.monotonic()
            if now >= connected.count_since + 1:
                connected.count_since, connected.num_messages = now, 0
            connected.num_messages += 1
            if connected.num_messages > MAX_MESSAGES_PER_S:
                raise ValueError(f"got more than {MAX_MESSAGES_PER_S} messages in a second")
            self._deliver(connected.rank, message)

    def _welcome(self, connected: _Connected, hello: Any) -> None:
        if not isinstance(hello, Hello):
            raise ValueError(f"got {type(hello).__name__}, expected Hello")
        if hello.version != self._types.version:
            raise ValueError(
                f"process {hello.pid} speaks version {hello.version}, expected {self._types.version}: install one "
                "version of fastdeploy-kvcache-v1 for the engine and its workers"
            )
        if hello.word != self._word:
            raise ValueError(f"process {hello.pid} is a worker rank of another engine")
        if hello.num_ranks != self.num_ranks or not 0 <= hello.rank < self.num_ranks:
            raise ValueError(
                f"process {hello.pid} is rank {hello.rank} of {hello.num_ranks}, expected 0 to {self.num_ranks - 1} of "
                f"{self.num_ranks}"
            )
        if hello.rank in self._ranks:
            raise ValueError(f"process {hello.pid} is rank {hello.rank}, which is connected already")
        connected.rank, connected.pid = hello.rank, hello.pid
        with self._lock:
            connected.peer.outbox.put(encode(Welcome(self._word)))
            connected.peer.flush()
            self._ranks[hello.rank] = connected
        self._deliver(hello.rank, hello)

    def _deliver(self, rank: int, message: Any) -> None:
        if (handler := self._handlers.get(type(message))) is not None:
            handler(rank, message)
        elif isinstance(message, Memory):
            message.file.close()

    def _flush(self, connected: _Connected) -> None:
        with self._lock:
            outbox = connected.peer.outbox
            is_overfull = outbox.is_overfull
            connected.peer.flush()
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if outbox else 0)
        if is_overfull:
            self._drop(connected, "it does not read what it is sent")
        elif (key := self._selector.get_key(connected.peer.socket)).events != events:
            self._selector.modify(connected.peer.socket, events, key.data)

    def _drop_silent(self) -> None:
        now = time.monotonic()
        for connected in [each for each in self._connected if each.rank is None and now - each.since >= HELLO_S]:
            self._drop(connected, f"got no Hello in {HELLO_S:.0f} s")

    def _drop(self, connected: _Connected, reason: str = "") -> None:
        if connected not in self._connected:
            return
        if reason:
            rank = "" if connected.rank is None else f" of worker rank {connected.rank} (process {connected.pid})"
            self._log_once(f"a connection{rank} is closed: {reason}")
        self._forget(connected)
        if connected.rank is not None:
            try:
                self._on_gone(connected.rank)
            except Exception:  # the edge of the thread
                self._log.exception("worker rank %d is gone, and this failed", connected.rank)

    def _forget(self, connected: _Connected) -> None:
        self._connected.discard(connected)
        self._selector.unregister(connected.peer.socket)
        with self._lock:
            if connected.rank is not None:
                del self._ranks[connected.rank]
            connected.peer.close()

    def _log_once(self, line: str) -> None:
        if line not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(line)
            self._log.warning("%s", line)


def _listen(path: Path) -> socket.socket:
    make_private(path.parent)
    with opening:
        listener = closed_in_children(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    try:
        if path.is_socket():
            path.unlink()
        listener.bind(os.fspath(path))
        listener.listen(socket.SOMAXCONN)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot make the socket {path}: {error}; set TMPDIR to another place") from None
    return listener
