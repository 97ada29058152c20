"""Network: how desks reach peers, as one argument. Tests give one without sockets and threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from .block_reader import BlockReader
from .control_link import ControlLink, Inbox, Self, greet
from .link_server import LinkServer

__all__ = ["SOCKETS", "Network"]


@dataclass(frozen=True)
class Network:
    """Each field is called as its default is."""

    greet: Callable[[str, int, Self, Inbox], ControlLink] = greet
    listen: Callable[[str, int, Self, Inbox], LinkServer] = LinkServer
    reader: Callable[..., BlockReader] = BlockReader
    thread: Callable[..., threading.Thread] = threading.Thread
    """For `greet`, which blocks."""


SOCKETS = Network()
