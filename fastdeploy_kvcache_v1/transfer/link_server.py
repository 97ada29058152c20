"""LinkServer: where prefill ranks reach a decode rank."""

from __future__ import annotations

from .acceptor import Acceptor, TakeOver
from .channel import Channel
from .control_link import Inbox, Self, welcome

MAX_HANDSHAKES = 256
"""At a time."""


class LinkServer:
    """A connection that is welcome becomes a link, which tells `inbox` of itself."""

    def __init__(self, host: str, port: int, ours: Self, inbox: Inbox) -> None:
        """Raises `ConfigError` when it cannot listen there."""
        self._ours = ours
        self._inbox = inbox
        self._acceptor = Acceptor(host, port, self._greet, name="a prefill rank's handshake", most=MAX_HANDSHAKES)
        self.port = self._acceptor.port
        self._acceptor.start()

    @property
    def num_refused(self) -> int:
        """Connections that were refused, broke in the handshake, or were too many."""
        return self._acceptor.num_refused

    def close(self) -> None:
        """No new link afterwards; those that there are stay. Idempotent."""
        self._acceptor.close()

    def _greet(self, channel: Channel) -> TakeOver:
        return welcome(channel, self._ours, self._inbox).start
