"""The tensor-parallel ranks of one model: what they tell each other while they compute a step.

A step is a sequence of rounds, the same on every rank. In each round every rank gives its part, or says that it failed,
and every rank gets the same answer: all parts in rank order, or the failure. So what one rank cannot do no rank does,
and a token is sampled on all ranks or on none.

Rank 0 collects the parts and sends out all of them, over one connection per other rank: no two ranks ever write to each
other at the same time, and a rank that ended is noticed at once.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any, NoReturn

from ..errors import RankLostError, RanksDisagreeError, TransferError

__all__ = ["ONE_RANK", "PeerError", "PeerTransferError", "Ranks", "join_ranks"]

DATA, COPY_FAILED, FAILED = range(3)
"""What a part is. Of two failures in one round, the greater number is told."""

CONNECT_RETRY_S = 0.02


class PeerTransferError(TransferError):
    """A copy failed on some rank; every rank gets this error."""


class PeerError(RuntimeError):
    """Computing failed on some rank; every rank gets this error."""


class Ranks:
    """One rank's view of its group, whose ranks are processes of one machine and user: what arrives is unpickled.

    One thread uses it.
    """

    def __init__(
        self, rank: int, peers: Sequence[Connection] = (), *, size: int = 1, timeout_s: float | None = None
    ) -> None:
        """`peers` of rank 0 are the connections to ranks 1, 2, ...; of another rank the one to rank 0. It owns them.

        A rank that sends nothing for `timeout_s` counts as lost; None sets no limit.
        """
        self.rank, self.size = rank, size
        self._peers = list(peers)
        self._timeout_s = timeout_s
        self._round = 0

    def exchange(self, part: bytes) -> list[bytes]:
        """The parts of all ranks, in rank order.

        Raises `PeerTransferError` or `PeerError` where a rank failed, `RankLostError` where one does not answer.
        """
        return self._exchange(DATA, part)

    def agree(self, result: bytes) -> None:
        """Every rank has come to this `result`. Raises as `exchange`, `RanksDisagreeError` if they differ."""
        if len(set(self._exchange(DATA, result))) > 1:
            raise RanksDisagreeError("the ranks computed different tokens for the same step (a bug)")

    def union(self, numbers: Iterable[int]) -> set[int]:
        """What any rank gives. Raises as `exchange`."""
        return set().union(*self._exchange(DATA, set(numbers)))

    def fail(self, error: Exception) -> NoReturn:
        """This rank cannot take part in the next round, for this reason. Raises what every other rank gets, too."""
        if self.size == 1:
            raise error
        is_copy = isinstance(error, TransferError)
        self._exchange(COPY_FAILED if is_copy else FAILED, str(error) if is_copy else repr(error))
        raise AssertionError("a round with a failed rank gives no parts")

    def close(self) -> None:
        """Idempotent."""
        for peer in self._peers:
            peer.close()

    def _exchange(self, kind: int, part: Any) -> list[Any]:
        """One round. The parts of all ranks; raises where one of them is a failure."""
        if self.rank == 0:
            parts = [(kind, part), *(self._receive(peer, rank) for rank, peer in enumerate(self._peers, 1))]
            for rank, peer in enumerate(self._peers, 1):
                self._send(peer, rank, parts)
        else:
            self._send(self._peers[0], 0, (kind, part))
            parts = self._receive(self._peers[0], 0)
        self._round += 1
        rank, (worst, reason) = max(enumerate(parts), key=lambda each: (each[1][0], -each[0]))
        if worst != DATA:
            raise (PeerTransferError if worst == COPY_FAILED else PeerError)(f"rank {rank}: {reason}")
        return [content for _, content in parts]

    def _send(self, peer: Connection, rank: int, content: Any) -> None:
        try:
            peer.send((self._round, content))
        except OSError:
            raise self._ended(rank) from None

    def _receive(self, peer: Connection, rank: int) -> Any:
        try:
            if not peer.poll(self._timeout_s):
                raise RankLostError(f"rank {rank} of {self.size} sent nothing for {self._timeout_s:g} s")
            number, content = peer.recv()
        except (OSError, EOFError):
            raise self._ended(rank) from None
        if number != self._round:
            raise RanksDisagreeError(f"rank {rank} is in round {number}, rank {self.rank} in {self._round} (a bug)")
        return content

    def _ended(self, rank: int) -> RankLostError:
        return RankLostError(f"rank {rank} of {self.size} has ended")


ONE_RANK = Ranks(0)
"""A model that is not split."""


def join_ranks(path: Path, rank: int, size: int, *, connect_timeout_s: float, timeout_s: float | None) -> Ranks:
    """Meet the other ranks at the Unix socket `path`, in a directory that only this user can enter; rank 0 makes it.

    `ONE_RANK` for a group of one. Raises `RankLostError` for ranks that do not come within `connect_timeout_s`.
    """
    if size == 1:
        return ONE_RANK
    deadline = time.monotonic() + connect_timeout_s
    peers = _accept(path, size, deadline) if rank == 0 else [_connect(path, rank, size, deadline)]
    return Ranks(rank, peers, size=size, timeout_s=timeout_s)


def _accept(path: Path, size: int, deadline: float) -> list[Connection]:
    """Each rank says first which one it is."""
    peers: dict[int, Connection] = {}
    path.unlink(missing_ok=True)  # of a group before
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:  # `Listener` waits without a limit
        listener.bind(str(path))
        listener.listen(size)
        try:
            while len(peers) < size - 1:
                listener.settimeout(max(deadline - time.monotonic(), 0.001))
                peer = Connection(listener.accept()[0].detach())
                peers[peer.recv()] = peer
        except (OSError, EOFError):
            missing = min(set(range(1, size)) - set(peers))
            raise RankLostError(f"rank {missing} of {size} did not come up") from None
        finally:
            path.unlink(missing_ok=True)
    return [peers[rank] for rank in range(1, size)]


def _connect(path: Path, rank: int, size: int, deadline: float) -> Connection:
    while True:
        try:
            peer = Client(str(path))
            peer.send(rank)
            return peer
        except OSError:
            if time.monotonic() > deadline:
                raise RankLostError(f"rank 0 of {size} did not come up") from None
            time.sleep(CONNECT_RETRY_S)
