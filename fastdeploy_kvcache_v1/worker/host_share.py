"""One host pool for all ranks of a machine, where every rank's blocks hold equal bytes: rank 0 writes it, all read it.

Every rank gets the same swap steps, so each one knows which host slots the others use, and its hazard table holds their
uses beside its own. When those end, only the other process knows: readers tell the writer of each swap-in that ended,
the writer tells every reader of each eviction.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Sequence
from queue import SimpleQueue

from ..errors import TransferError
from .runtime import Event
from .runtime.base import describe
from .runtime.cpu import CpuEvent

__all__ = ["HostShare", "PeerEvent"]

WRITER = 0
"""Its rank."""

_ENDED = struct.Struct("<qI")
"""Swap step of a copy, and the bytes of its error that follow; 0 for a copy that went well."""

MAX_ERROR_BYTES = 1000
CLOSE_TIMEOUT_S = 1.0


class PeerEvent(CpuEvent):
    """The end of another rank's copy."""


class _Peer:
    """How the copies of one other rank end. A thread hears of it; the worker's thread asks, before or after that."""

    def __init__(self, rank: int, link: socket.socket) -> None:
        self.link = link
        self._rank = rank
        self._lock = threading.Lock()
        self._events: dict[int, PeerEvent] = {}
        """By swap step, of copies that were asked for or have ended, but not both."""
        self._is_lost = False
        self._thread = threading.Thread(target=self._listen, name=f"kv-rank{rank}", daemon=True)
        self._thread.start()

    def end_of(self, step: int) -> PeerEvent:
        """Ask once for each step. It has failed where the copy has, or where the rank has ended."""
        with self._lock:
            event = self._events.pop(step, None)
            if event is None:
                event = PeerEvent()
                if self._is_lost:
                    event.finish(self._lost())
                else:
                    self._events[step] = event
            return event

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the other end may have closed it
            self.link.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self.link.close()

    def _listen(self) -> None:
        try:
            with self.link.makefile("rb") as frames:
                while len(head := frames.read(_ENDED.size)) == _ENDED.size:
                    step, length = _ENDED.unpack(head)
                    error = frames.read(length).decode(errors="replace") if length else None
                    self._finish(step, None if error is None else TransferError(f"rank {self._rank}: {error}"))
        except OSError:
            pass  # a rank that was killed; as its orderly end
        with self._lock:
            self._is_lost = True
            for event in self._events.values():
                if not event.done():
                    event.finish(self._lost())

    def _finish(self, step: int, error: TransferError | None) -> None:
        with self._lock:
            event = self._events.pop(step, None)
            if event is None:  # it ended before this rank came to that step
                event = self._events[step] = PeerEvent()
            event.finish(error)

    def _lost(self) -> TransferError:
        return TransferError(f"rank {self._rank} has ended")


class HostShare:
    """One rank's end of a shared host pool. The worker's thread uses it; CPU only, since threads do the waiting.

    Memory: O(copies that have ended on one rank, and that another one has not come to).
    """

    def __init__(self, rank: int, file: int, links: Sequence[socket.socket]) -> None:
        """`file`: descriptor of the shared memory, which stays the caller's. `links`: of rank 0 to ranks 1, 2, ...;
        of another rank to rank 0. They are its own now.
        """
        self.file = file
        self.is_writer = rank == WRITER
        ranks = range(1, len(links) + 1) if self.is_writer else (WRITER,)
        self._peers = [_Peer(*each) for each in zip(ranks, links, strict=True)]
        self._ends: SimpleQueue[tuple[int, Event] | None] = SimpleQueue()
        self._teller = threading.Thread(target=self._tell_ends, name="kv-tell", daemon=True)
        self._teller.start()

    def peers_ends(self, step: int) -> list[PeerEvent]:
        """Of the writer: the ends of the readers' swap-ins of `step`. Of a reader: that of the writer's eviction."""
        return [peer.end_of(step) for peer in self._peers]

    def tell(self, step: int, finished: Event) -> None:
        """The peers of this rank hear of the end of its own copy: in the writer its evictions, in a reader its
        swap-ins. In order of `step`.
        """
        self._ends.put((step, finished))

    def close(self) -> None:
        """What has ended is told. Idempotent."""
        self._ends.put(None)
        self._teller.join(CLOSE_TIMEOUT_S)  # it waits for a copy that hangs, whose process is about to end
        for peer in self._peers:
            peer.close()

    def _tell_ends(self) -> None:
        while (end := self._ends.get()) is not None:
            step, finished = end
            finished.wait_done()
            error = b"" if finished.error is None else describe(finished.error).encode()[:MAX_ERROR_BYTES]
            for peer in self._peers:
                try:
                    peer.link.sendall(_ENDED.pack(step, len(error)) + error)
                except OSError:
                    continue  # it has ended, which the engine tells
