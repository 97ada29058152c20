"""ControlLink: one authenticated connection between a prefill rank and a decode rank, watched by pings.

Two threads: one sends what was queued, and a ping where nothing was; one receives. Neither does anything else: what
arrives goes to an inbox, and the loop that owns the inbox acts on it.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import NamedTuple

from ..errors import PeerRefusedError
from .authentication import accept_peer, prove_to_peer
from .channel import Channel, connect
from .geometry import Geometry, require_compatible
from .messages import Hello, Message, Ping, Refused, Welcome, decode, encode
from .settings import TransferSettings

__all__ = ["ControlLink", "Inbox", "LinkClosed", "LinkOpened", "Self", "greet", "welcome"]

_PURPOSE = b"control"


class LinkOpened(NamedTuple):
    """Arrives before any message of the link."""


class LinkClosed(NamedTuple):
    """The last thing that arrives from a link, once."""

    reason: str


@dataclass(frozen=True)
class Self:
    """What a rank says about itself."""

    geometry: Geometry
    address: bytes
    """Of its data plane."""
    settings: TransferSettings


class ControlLink:
    """`send` and `want` never block; any thread may call them. Made by `greet` and `welcome`."""

    def __init__(self, channel: Channel, ours: Self, theirs: Hello | Welcome, inbox: Inbox) -> None:
        self.peer = channel.peer
        self.geometry = theirs.geometry
        self.instance = theirs.instance
        self.address = theirs.address if isinstance(theirs, Hello) else b""
        """Of the peer's data plane; only prefill ranks are read."""
        self._channel = channel
        self._settings = ours.settings
        self._inbox = inbox
        self._outbox: SimpleQueue[Message | None] = SimpleQueue()
        self._wanted: tuple[str, ...] = ()
        self._reason: str | None = None
        self._threads = [
            threading.Thread(target=target, name=f"kv-transfer-{target.__name__.strip('_')}", daemon=True)
            for target in (self._send_all, self._receive_all)
        ]

    def start(self) -> None:
        """From now on, things arrive in the inbox."""
        self._inbox.put((self, LinkOpened()))
        for thread in self._threads:
            thread.start()

    def send(self, message: Message) -> None:
        """In order. What is queued when the link closes is lost, and the peer learns of the close."""
        self._outbox.put(message)

    def want(self, leases: tuple[str, ...]) -> None:
        """Pings name these leases from now on."""
        self._wanted = leases

    def close(self, reason: str) -> None:
        """Nothing is sent or received when this returns, and `LinkClosed` is in the inbox. Idempotent."""
        self._end(reason)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        self._channel.close()

    def _end(self, reason: str) -> None:
        self._reason = self._reason or reason
        self._outbox.put(None)
        self._channel.shut_down()

    def _send_all(self) -> None:
        next_ping = time.monotonic()
        try:
            while True:
                try:
                    message = self._outbox.get(timeout=max(0.0, next_ping - time.monotonic()))
                except Empty:
                    message = Ping(list(self._wanted))
                    next_ping = time.monotonic() + self._settings.ping_s
                if message is None:
                    return
                self._channel.send_frame(encode(message), time.monotonic() + self._settings.silence_s)
        except (OSError, EOFError) as error:
            self._end(f"{self.peer} cannot be reached: {error}")

    def _receive_all(self) -> None:
        try:
            while True:
                frame = self._channel.receive_frame(time.monotonic() + self._settings.silence_s)
                self._inbox.put((self, decode(frame)))
        except TimeoutError:
            self._end(f"{self.peer} sent no heartbeat for {self._settings.silence_s:g} s")
        except (OSError, EOFError, PeerRefusedError) as error:
            self._end(f"the link to {self.peer} broke: {error}")
        finally:
            self._inbox.put((self, LinkClosed(self._reason or "the link was closed")))


Inbox = SimpleQueue[tuple[ControlLink, Message | LinkOpened | LinkClosed]]


def greet(host: str, port: int, ours: Self, inbox: Inbox) -> ControlLink:
    """The prefill rank's end. Blocks for `handshake_s` at most; the link is not started yet. Raises
    `PeerRefusedError` with the reason of whoever refuses, `OSError` when the peer does not answer.
    """
    deadline = time.monotonic() + ours.settings.handshake_s
    channel = connect(host, port, deadline)
    try:
        prove_to_peer(channel, ours.settings.secret, _PURPOSE, deadline)
        channel.send_frame(encode(Hello(ours.geometry, ours.address, ours.settings.instance)), deadline)
        answer = decode(channel.receive_frame(deadline))
        if isinstance(answer, Refused):
            raise PeerRefusedError(f"{channel.peer} refuses: {answer.reason}")
        if not isinstance(answer, Welcome):
            raise PeerRefusedError(f"{channel.peer} answers with {type(answer).__name__} instead of Welcome")
        require_compatible(ours.geometry, answer.geometry)
        return ControlLink(channel, ours, answer, inbox)
    except EOFError as error:
        channel.close()
        raise ConnectionError(str(error)) from None
    except BaseException:
        channel.close()
        raise


def welcome(channel: Channel, ours: Self, inbox: Inbox) -> ControlLink:
    """The decode rank's end of a connection that was accepted; else as `greet`. Does not close `channel`."""
    deadline = time.monotonic() + ours.settings.handshake_s
    accept_peer(channel, ours.settings.secret, _PURPOSE, deadline)
    hello = decode(channel.receive_frame(deadline))
    if not isinstance(hello, Hello):
        raise PeerRefusedError(f"{channel.peer} begins with {type(hello).__name__} instead of Hello")
    try:
        require_compatible(ours.geometry, hello.geometry)
    except PeerRefusedError as error:
        channel.send_frame(encode(Refused(f"{error}"[:2000])), deadline)
        raise
    channel.send_frame(encode(Welcome(ours.geometry, ours.settings.instance)), deadline)
    return ControlLink(channel, ours, hello, inbox)
