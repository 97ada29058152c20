"""Exchange between the tensor-parallel ranks of a model while they compute a step.

A step has the same rounds on each rank. In a round each rank gives its part or its failure, and all ranks get the same
answer: all parts in rank order, or the failure. So a token is sampled on all ranks or on none.

Rank 0 collects and sends the parts over one connection per rank. So no two ranks write to each other at the same time,
and the end of a rank is noticed at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from ...errors import RankLostError, RanksDisagreeError, TransferError

__all__ = ["ONE_RANK", "PeerError", "PeerTransferError", "Ranks", "inherited_pipes", "rank_pipes"]

DATA, COPY_FAILED, FAILED = range(3)
"""Kinds of parts. Of two failures in a round, the greater number wins."""


class PeerTransferError(TransferError):
    """A copy failed on some rank. All ranks get this error."""


class PeerError(RuntimeError):
    """Computing failed on some rank. All ranks get this error."""


class Ranks:
    """One rank's view of its group: processes of one user, because messages are unpickled. Not thread-safe."""

    def __init__(
        self, rank: int, peers: Sequence[Connection] = (), *, size: int = 1, timeout_s: float | None = None
    ) -> None:
        """Owns `peers`: of rank 0 the connections to ranks 1, 2, ...; of another rank the one to rank 0.

        A rank that sends nothing for `timeout_s` is lost; None sets no limit.
        """
        self.rank, self.size = rank, size
        self._peers = list(peers)
        self._timeout_s = timeout_s
        self._round = 0

    def exchange(self, part: bytes) -> list[bytes]:
        """The parts of all ranks, in rank order. Raises `PeerTransferError` or `PeerError` if a rank failed,
        `RankLostError` if one does not answer.
        """
        return self._exchange(DATA, part)

    def agree(self, result: bytes) -> None:
        """Compare `result` on all ranks. Raises like `exchange`, and `RanksDisagreeError` for a difference."""
        if len(set(self._exchange(DATA, result))) > 1:
            raise RanksDisagreeError("the ranks computed different tokens for the same step (a bug)")

    def union(self, numbers: Iterable[int]) -> set[int]:
        """The union of all ranks' parts. Raises like `exchange`."""
        return set().union(*self._exchange(DATA, set(numbers)))

    def fail(self, error: Exception) -> NoReturn:
        """Fail the next round for this reason. Raises the error that all ranks get."""
        if self.size == 1:
            raise error
        is_copy = isinstance(error, TransferError)
        self._exchange(COPY_FAILED if is_copy else FAILED, str(error) if is_copy else repr(error))
        raise AssertionError("a round with a failed rank gives no parts")

    def close(self) -> None:
        for peer in self._peers:
            peer.close()

    def _exchange(self, kind: int, part: Any) -> list[Any]:
        """One round: the parts of all ranks. Raises for a failure among them."""
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


def rank_pipes(size: int) -> list[list[Connection]]:
    """The `peers` of each of `size` ranks, made by the process that starts the rank processes, which inherit them."""
    pairs = [Pipe() for _ in range(size - 1)]
    return [[first for first, _ in pairs], *([other] for _, other in pairs)]


def inherited_pipes(descriptors: Iterable[str]) -> list[Connection]:
    """Pipes of this process by file descriptor. Its child processes do not inherit them."""
    numbers = [int(each) for each in descriptors]
    for number in numbers:
        os.set_inheritable(number, False)
    return [Connection(number) for number in numbers]
