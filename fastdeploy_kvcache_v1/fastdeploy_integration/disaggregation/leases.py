"""Leases: a prefill server's account of its transfers. Each is a lease on every rank, and is over when all have ended.

Ranks end their leases at different times and in different orders. What fails on one rank is withdrawn on the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ...errors import CacheStateError, InvariantError
from ...transfer.ledger import LeaseLedger
from ...transfer.offer_desk import LeaseEnd
from ...transfer.rank_messages import TransferCommand, TransferNews, WithdrawLease
from ...transfer.role_info import RankInfo

FINISHED = "finished"
"""FastDeploy's word for a transfer that went well; one that failed has "error" in its text."""


class LeaseOpened(NamedTuple):
    """A rank offers the blocks of a request, under the name of the transfer."""

    lease: str
    request_id: str


class LeaseWithdrawn(NamedTuple):
    """A rank gives a lease up, as every other rank does by itself; its end follows."""

    lease: str


LeaseNews = LeaseOpened | LeaseWithdrawn | LeaseEnd


class RankNews(NamedTuple):
    """What a rank is, once it has its caches; what ended at decode; what became of a lease at prefill."""

    rank: int
    news: TransferNews | LeaseNews | RankInfo


@dataclass
class _Open:
    request_id: str
    error: str | None = None
    """Of the rank that failed first."""


class Leases:
    """Not thread-safe: the adapter's lock covers it. Any thread may read the numbers of `ledger`."""

    def __init__(self, *, num_ranks: int, send: Callable[[TransferCommand], object]) -> None:
        """`send` tells every rank."""
        self.ledger = LeaseLedger(num_ranks=num_ranks)
        self._send = send
        self._open: dict[str, _Open] = {}
        self._ended: list[list[str]] = []

    def heard(self, rank: int, news: LeaseNews) -> None:
        """What a rank says, in order. Raises `CacheStateError`, nothing changed, for an end that it does not owe."""
        match news:
            case LeaseOpened():
                self._opened(news)
            case LeaseWithdrawn():
                self.ledger.withdraw(news.lease)
            case LeaseEnd():
                self._end(rank, news)

    def withdraw_all(self, reason: str) -> None:
        """Have every rank end those that are open."""
        for name, lease in self._open.items():
            lease.error = lease.error or reason
            if self.ledger.withdraw(name):
                self._send(WithdrawLease(name, reason))

    def take_ended(self) -> list[list[str]]:
        """Request id and status of transfers that have ended on every rank since the last call, as FastDeploy wants
        them.
        """
        ended, self._ended = self._ended, []
        return ended

    def check(self) -> None:
        """Raises `InvariantError`."""
        if self.ledger.num_open != len(self._open):
            raise InvariantError(f"{self.ledger.num_open} leases are open, of {len(self._open)} requests")

    def check_idle(self) -> None:
        """Raises `InvariantError` unless every lease is over."""
        self.check()
        self.ledger.check_idle()

    def _opened(self, news: LeaseOpened) -> None:
        lease = self._open.get(news.lease)
        if lease is None:
            self.ledger.open(news.lease)
            self._open[news.lease] = _Open(news.request_id)
        elif lease.error is not None:  # what the others were told came before there was a lease
            self._send(WithdrawLease(news.lease, lease.error))

    def _end(self, rank: int, end: LeaseEnd) -> None:
        lease = self._open.get(end.lease)
        if lease is None:
            raise CacheStateError(f"rank {rank} reports the end of lease {end.lease}, which is not open")
        is_over = self.ledger.report(end, rank)
        if end.error is not None and lease.error is None:
            lease.error = end.error
            if not is_over and self.ledger.withdraw(end.lease):
                self._send(WithdrawLease(end.lease, end.error))
        if is_over:
            del self._open[end.lease]
            self._ended.append([lease.request_id, FINISHED if lease.error is None else f"error: {lease.error}"])
