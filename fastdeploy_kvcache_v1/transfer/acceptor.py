"""Acceptor: gives each connection at an address a thread of its own, so one that says nothing holds up nobody."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable

from ..errors import PeerRefusedError
from .channel import Channel, listen

logger = logging.getLogger(__name__)

TakeOver = Callable[[], None]


class Acceptor:
    """`handle(channel)` is called in the connection's thread. When it returns or raises, the connection is closed,
    unless it returned a function that takes the channel over. That is called under the acceptor's lock, never after
    `close`.
    """

    def __init__(
        self, host: str, port: int, handle: Callable[[Channel], TakeOver | None], *, name: str, most: int
    ) -> None:
        """Listens; connections wait until `start`. `name` is what a connection is called in the log, `most` how many
        are handled at a time: others are refused. Raises `ConfigError` when it cannot listen there.
        """
        self._handle = handle
        self._name = name
        self._most = most
        self._lock = threading.Lock()
        self._open: dict[Channel, threading.Thread] = {}
        self._is_closed = False
        self._num_refused = 0
        self._listener = listen(host, port)
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="kv-transfer-accept", daemon=True)

    @property
    def num_refused(self) -> int:
        """Connections that were refused, were too many, or ended with an error. Any thread."""
        return self._num_refused

    def start(self) -> None:
        """Once."""
        self._thread.start()

    def close(self) -> None:
        """When this returns, no thread handles a connection; what was taken over stays. Idempotent."""
        with self._lock:
            self._is_closed = True
            open_ones = dict(self._open)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for channel in open_ones:
            channel.shut_down()
        for thread in (self._thread, *open_ones.values()):
            if thread.ident is not None:
                thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(0.05)  # out of descriptors: others may be closed
                continue
            channel = Channel(connection)
            thread = threading.Thread(target=self._run, args=(channel,), name="kv-transfer-peer", daemon=True)
            with self._lock:
                refused = self._is_closed or len(self._open) >= self._most
                if refused:
                    self._num_refused += 1
                else:
                    self._open[channel] = thread
                    thread.start()
            if refused:
                channel.close()

    def _run(self, channel: Channel) -> None:
        take_over, failed = None, True
        try:
            take_over = self._handle(channel)
            failed = False
        except (PeerRefusedError, OSError, EOFError) as error:
            logger.warning("%s of %s ended: %s", self._name, channel.peer, error)
        except Exception:  # thread edge: one connection fails, the others go on
            logger.exception("%s failed", self._name)
        with self._lock:
            del self._open[channel]
            self._num_refused += failed
            if take_over is not None and not self._is_closed:
                take_over()
                return
        channel.close()
