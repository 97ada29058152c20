"""LinkServer: where prefill ranks reach a decode rank."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time

from ..errors import PeerRefusedError
from .channel import Channel, listen
from .control_link import Inbox, Self, welcome

logger = logging.getLogger(__name__)

MAX_HANDSHAKES = 256
"""At a time."""


class LinkServer:
    """Each connection is greeted by a thread of its own, so one that says nothing holds up nobody."""

    def __init__(self, host: str, port: int, ours: Self, inbox: Inbox) -> None:
        """Raises `ConfigError` when it cannot listen there."""
        self._ours = ours
        self._inbox = inbox
        self._lock = threading.Lock()
        self._handshakes: dict[Channel, threading.Thread] = {}
        self._is_closed = False
        self.num_refused = 0
        """Connections that were refused, broke in the handshake, or were too many."""
        self._listener = listen(host, port)
        self.port: int = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept, name="kv-transfer-links", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """No new link afterwards; those that there are stay. Idempotent."""
        with self._lock:
            self._is_closed = True
            open_ones = dict(self._handshakes)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for channel in open_ones:
            channel.shut_down()
        for thread in (self._acceptor, *open_ones.values()):
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
            thread = threading.Thread(target=self._greet, args=(channel,), name="kv-transfer-hello", daemon=True)
            with self._lock:
                refused = self._is_closed or len(self._handshakes) >= MAX_HANDSHAKES
                if refused:
                    self.num_refused += 1
                else:
                    self._handshakes[channel] = thread
                    thread.start()
            if refused:
                channel.close()

    def _greet(self, channel: Channel) -> None:
        link = None
        try:
            link = welcome(channel, self._ours, self._inbox)
        except (PeerRefusedError, OSError, EOFError) as error:
            logger.warning("a prefill peer was refused: %s", error)
        except Exception:  # thread edge: one connection fails, the others go on
            logger.exception("the handshake with a prefill peer failed")
        with self._lock:
            del self._handshakes[channel]
            if link is not None and not self._is_closed:
                link.start()
                return
            self.num_refused += 1
        channel.close()
