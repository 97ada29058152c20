"""RankLink: a worker rank's end of its connection to the engine."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..contract.messages import WorkerReport
from .messages import Hello, MessageTypes, Welcome, encode
from .peer import Outbox, Peer, Waker, unix_socket

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0
"""Between attempts to connect. Each pause is twice the one before."""

WELCOME_S = 10.0


class RankLink:
    """Thread-safe. `send` neither waits for the engine nor raises because of it.

    The engine may start later. Once it has welcomed the rank, the end of that connection is the end of the link:
    another engine has other blocks.
    """

    def __init__(self, path: Path, rank: int, num_ranks: int, types: MessageTypes, *, word: str) -> None:
        """`word`: see `Hello`."""
        self._path = path
        self._hello = Hello(types.version, rank, num_ranks, os.getpid(), word)
        self._types = types
        self._lock = threading.Lock()
        """Of sending."""
        self._outbox = Outbox()
        self._report: WorkerReport | None = None
        """It waits until everything else is sent, and later ones are added to it: so only one waits."""
        self._peer: Peer | None = None
        """None until the engine has welcomed this rank, and after the end."""
        self._is_over = threading.Event()
        self._was_refused = False
        self._handlers: Mapping[type, Callable[[Any], None]] = {}
        self._on_gone: Callable[[], None] = lambda: None
        self._waker = Waker()
        self._thread: threading.Thread | None = None

    def listen(
        self, handlers: Mapping[type, Callable[[Any], None]], on_gone: Callable[[], None] = lambda: None
    ) -> None:
        """Connect, and deliver what the engine says, in order, on a thread of the link, which must not wait. Once.

        `handlers` by type, which may grow. A message without one is dropped. `on_gone` is called when the connection
        has ended: what is sent afterwards is dropped.
        """
        self._handlers, self._on_gone = handlers, on_gone
        self._thread = threading.Thread(target=self._run, name="kv-link", daemon=True)
        self._thread.start()

    @property
    def is_connected(self) -> bool:
        return self._peer is not None

    def send(self, message: object, descriptor: int | None = None) -> None:
        """Send now, or when there is an engine that reads. `descriptor`, of a `Memory`, stays the caller's."""
        with self._lock:
            if self._is_over.is_set():
                return
            if isinstance(message, WorkerReport):
                self._report = message if self._report is None else self._report.merged(message)
            else:
                self._outbox.put(encode(message), descriptor)
            self._flush()
            waits = bool(self._outbox) or self._outbox.is_overfull
        if waits:
            self._waker.wake()

    def close(self) -> None:
        """Drop what is unsent. Nothing is delivered afterwards. Idempotent."""
        self._end()
        self._waker.wake()
        if self._thread is not None:
            self._thread.join()
        self._waker.close()

    def _flush(self) -> None:
        """Under the lock."""
        if self._peer is None:
            return
        self._peer.flush()
        if self._report is not None and not self._outbox:
            self._outbox.put(encode(self._report))
            self._peer.flush()
            self._report = None

    def _end(self) -> bool:
        """Returns False if it had ended before."""
        with self._lock:
            if self._is_over.is_set():
                return False
            self._is_over.set()
            self._peer = None
            self._outbox.clear()
            self._report = None
            return True

    # ---- the thread

    def _run(self) -> None:
        pause = FIRST_PAUSE_S
        while not self._is_over.wait(pause):
            pause = min(2 * pause, LONGEST_PAUSE_S)
            peer = Peer(unix_socket, self._types.to_rank)
            try:
                peer.socket.connect(os.fspath(self._path))
                self._meet(peer)
            except OSError:
                pass  # no engine yet, or its line of connections is full
            except (EOFError, ValueError) as error:
                if not self._was_refused:
                    self._was_refused = True
                    reason = str(error) or "see its log"
                    logger.warning("%s refuses this rank, which tries again (%s)", self._path, reason)
            else:
                self._serve(peer)
            finally:
                peer.close()

    def _meet(self, peer: Peer) -> None:
        """Returns when the engine has welcomed this rank, or the link is closed. Raises as `Peer`."""
        peer.outbox.put(encode(self._hello))
        deadline = time.monotonic() + WELCOME_S
        while not self._is_over.is_set():
            peer.flush()
            for message in peer.messages():
                if not isinstance(message, Welcome) or message.word != self._hello.word:
                    raise ValueError(f"got {message}, expected its Welcome")
                with self._lock:
                    if not self._is_over.is_set():
                        self._peer, peer.outbox = peer, self._outbox
                        self._flush()
                return
            if (left := deadline - time.monotonic()) <= 0:
                raise ValueError(f"got no answer in {WELCOME_S:.0f} s")
            self._wait(peer, left)

    def _serve(self, peer: Peer) -> None:
        reason = "the engine does not read what it is sent"
        try:
            while not self._is_over.is_set():
                for message in peer.messages():
                    if self._is_over.is_set():
                        return
                    if (handler := self._handlers.get(type(message))) is not None:
                        handler(message)
                with self._lock:
                    self._flush()
                    if self._outbox.is_overfull:
                        break
                self._wait(peer, None)
        except EOFError:
            reason = "its connection has ended"
        except ValueError as error:
            reason = str(error)
        except Exception:  # the edge of the thread
            logger.exception("a message of the engine failed")
            reason = "a message failed"
        if self._end():
            logger.warning("the link to the engine is closed: %s", reason)
            self._on_gone()

    def _wait(self, peer: Peer, timeout_s: float | None) -> None:
        """Wait for the engine, for room to send to it, or for `_waker`. Raises as `Peer.receive`."""
        poll = select.poll()
        poll.register(self._waker.receiver, select.POLLIN)
        poll.register(peer.socket, select.POLLIN | (select.POLLOUT if peer.outbox else 0))
        ready = dict(poll.poll(None if timeout_s is None else 1000 * timeout_s))
        if self._waker.receiver.fileno() in ready:
            self._waker.clear()
        if ready.get(peer.socket.fileno(), 0) & ~select.POLLOUT:
            peer.receive()
