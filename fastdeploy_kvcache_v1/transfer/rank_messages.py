"""What an engine says to the transfer desks of its own ranks, and what they answer. Plain picklable data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .fetch import FetchResult
from .offer_desk import LeaseEnd
from .settings import PeerPort

__all__ = ["COMMANDS", "CancelFetch", "OpenLease", "StartFetch", "TransferCommand", "TransferNews", "WithdrawLease"]


class OpenLease(NamedTuple):
    """Prefill: offer the blocks of a request before the first pass that computes one of them. See `OfferDesk.open`."""

    lease: str
    request_id: str
    slots: tuple[int, ...]
    """All blocks of the prompt, also those that are found in the cache, in prompt order."""
    num_tokens: int
    peers: tuple[PeerPort, ...]
    """The ranks of the decode server. Each reads what it needs of this rank's part of the blocks, maybe nothing."""


class WithdrawLease(NamedTuple):
    """Prefill: see `OfferDesk.withdraw`. Nothing happens to one that has ended."""

    lease: str
    reason: str


class StartFetch(NamedTuple):
    """Decode: see `FetchDesk.fetch`."""

    request_id: str
    slots: tuple[int, ...]
    first_block: int
    after_step: int = -1


class CancelFetch(NamedTuple):
    """Decode: see `FetchDesk.cancel`. The result follows, unless the fetch ended before."""

    request_id: str
    reason: str


TransferCommand = OpenLease | WithdrawLease | StartFetch | CancelFetch
COMMANDS = (OpenLease, WithdrawLease, StartFetch, CancelFetch)


@dataclass(frozen=True)
class TransferNews:
    """What ended on a rank since the last news, each once. False when nothing did."""

    leases: tuple[LeaseEnd, ...] = ()
    fetches: tuple[FetchResult, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.leases or self.fetches)
