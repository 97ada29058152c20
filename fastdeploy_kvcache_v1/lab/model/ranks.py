"""The tensor-parallel ranks of one model: what they tell each other while they compute a step.

A step is a sequence of rounds, the same on every rank. In each round every rank gives its part, or says that it failed,
and every rank gets the same answer: all parts in rank order, or the failure. So what one rank cannot do no rank does,
and a token is sampled on all ranks or on none.

Rank 0 collects the parts and sends out all of them, over one connection per other rank. So two ranks never write to
each other at the same time, and a rank that ended is noticed at once.
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
"""What a part is. Of two failures in one round, the greater number is told."""


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


def rank_pipes(size: int) -> list[list[Connection]]:
    """Make the `peers` of each of `size` ranks, in the process that starts them: ranks inherit their connections."""
    pairs = [Pipe() for _ in range(size - 1)]
    return [[first for first, _ in pairs], *([other] for _, other in pairs)]


def inherited_pipes(descriptors: Iterable[str]) -> list[Connection]:
    """Pipes of this process by the numbers of their file descriptors. No process that it starts inherits them."""
    numbers = [int(each) for each in descriptors]
    for number in numbers:
        os.set_inheritable(number, False)
    return [Connection(number) for number in numbers]
