"""What worker processes inherit for one host pool of all ranks: its memory, and a socket from rank 0 to each other one.

The engine process makes them, because it starts the ranks, and keeps none: the end of a process closes its sockets.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from ...errors import ConfigError
from ...worker import ops
from ...worker.host_share import HostShare

__all__ = ["ShareEnds", "make_share_ends"]


@dataclass(frozen=True)
class ShareEnds:
    """One rank's descriptors. A process that inherited them has them under the same numbers."""

    file: int
    links: tuple[int, ...]

    @property
    def descriptors(self) -> tuple[int, ...]:
        return (self.file, *self.links)

    def open(self, rank: int) -> HostShare:
        """In the rank's process, once."""
        return HostShare(rank, self.file, [socket.socket(fileno=link) for link in self.links])


@contextlib.contextmanager
def make_share_ends(num_ranks: int) -> Iterator[list[ShareEnds]]:
    """By rank; closed here when the ranks have been started. Raises `ConfigError` where the system has none left."""
    with contextlib.ExitStack() as opened:
        try:
            file = ops.memory_file()
            opened.callback(os.close, file)
            links = [
                tuple(opened.enter_context(end).fileno() for end in socket.socketpair()) for _ in range(num_ranks - 1)
            ]
        except OSError as error:
            raise ConfigError(f"cannot share host memory between ranks: {error}") from None
        yield [ShareEnds(file, tuple(mine for mine, _ in links)), *(ShareEnds(file, (theirs,)) for _, theirs in links)]
