"""The engine's account of leases and fetches: what is open on its ranks, until when, and how it ended.

Slots are given back by what these say, and by nothing else: a lease or a fetch is over when every rank has reported it.
Neither ledger knows a server. Not thread-safe.
"""

from __future__ import annotations

import enum
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from ..errors import CacheStateError, InvariantError
from ..telemetry.metrics import counter, gauge_of, part, source
from .fetch import FetchResult
from .offer_desk import LeaseEnd

__all__ = ["FetchEnd", "FetchLedger", "FetchOutcome", "FetchState", "LeaseLedger", "TransferTotals"]


class FetchState(str, enum.Enum):
    GRANTED = "granted"
    """It has slots, and no rank was told."""
    FETCHING = "fetching"
    ENDING = "ending"
    """It is not wanted any more, or failed on a rank; bytes may arrive until every rank has reported."""


class FetchOutcome(str, enum.Enum):
    ARRIVED = "arrived"
    FAILED = "failed"
    """A rank said so: the peer, the link or the bytes."""
    CANCELLED = "cancelled"
    """This engine gave it up: its client left, or what is needed besides the blocks failed."""
    OVERDUE = "overdue"
    """This engine gave it up at its deadline."""


class FetchEnd(NamedTuple):
    """No byte can arrive in its slots any more."""

    request_id: str
    outcome: FetchOutcome
    reason: str = ""
    """Why it did not arrive."""


_by_outcome = partial(
    counter, "Leases (prefill) and fetches (decode) by how they ended", "transfers_ended", by="outcome"
)


@dataclass
class TransferTotals:
    """Of fetches or leases since the start. One thread writes; any thread may read single fields."""

    started: int = counter("Leases (prefill) or fetches (decode) that were begun", "transfers_started")
    arrived: int = _by_outcome()
    failed: int = _by_outcome()
    cancelled: int = _by_outcome()
    overdue: int = _by_outcome()
    num_bytes: int = counter("Bytes of blocks that arrived (decode)", "transfer_bytes")
    """On all ranks."""
    seconds: float = counter(
        "Time of fetches that arrived, from their begin to their end (decode); it overlaps with the prefill",
        "transfer_seconds",
    )
    """On the slowest rank each."""

    def count(self, outcome: FetchOutcome) -> None:
        setattr(self, outcome.value, getattr(self, outcome.value) + 1)


@source("prefill or decode role", "side")
class Ledger(ABC):
    """What both ledgers show."""

    totals: TransferTotals = part(TransferTotals)

    def __init__(self) -> None:
        self.totals = TransferTotals()

    @abstractmethod
    def __len__(self) -> int:
        """Leases or fetches that are not over."""

    @property
    @gauge_of("Open leases (prefill) or fetches (decode)", "transfer_open")
    def num_open(self) -> int:
        """Any thread may read it."""
        return len(self)


@dataclass(eq=False)
class _Fetch:
    deadline: float
    state: FetchState = FetchState.GRANTED
    ranks_left: set[int] = field(default_factory=set)
    outcome: FetchOutcome = FetchOutcome.ARRIVED
    reason: str = ""
    num_bytes: int = 0
    seconds: float = 0.0


class FetchLedger(Ledger):
    """The decode side. `clock` is `time.monotonic` outside of tests."""

    def __init__(self, *, num_ranks: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._num_ranks = num_ranks
        self._clock = clock
        self._fetches: dict[str, _Fetch] = {}
        self._to_cancel: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._fetches)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._fetches

    def state(self, request_id: str) -> FetchState | None:
        """None when it is over, or never was."""
        fetch = self._fetches.get(request_id)
        return None if fetch is None else fetch.state

    def grant(self, request_id: str, wait_s: float) -> bool:
        """The request has slots; it is given up `wait_s` seconds from now. False, and nothing happens, if it is known
        already: a request that is sent twice gets slots once.
        """
        if request_id in self._fetches:
            return False
        self._fetches[request_id] = _Fetch(self._clock() + wait_s)
        return True

    def start(self, request_id: str) -> None:
        """Every rank is told to fetch. Raises `CacheStateError` unless it is granted."""
        fetch = self._fetches.get(request_id)
        if fetch is None or fetch.state is not FetchState.GRANTED:
            raise CacheStateError(f"the fetch of request {request_id} has no slots, or has started already")
        fetch.state = FetchState.FETCHING
        fetch.ranks_left = set(range(self._num_ranks))
        self.totals.started += 1

    def cancel(self, request_id: str, reason: str, outcome: FetchOutcome = FetchOutcome.CANCELLED) -> FetchEnd | None:
        """Give it up. The end, if no rank was told yet; else it follows once every rank has reported, see
        `take_cancels`. None as well for one that ends already, or is over.
        """
        fetch = self._fetches.get(request_id)
        if fetch is None or fetch.state is FetchState.ENDING:
            return None
        fetch.outcome, fetch.reason = outcome, reason
        if fetch.state is FetchState.GRANTED:
            return self._end(request_id, fetch)
        fetch.state = FetchState.ENDING
        self._to_cancel[request_id] = reason
        return None

    def give_up_overdue(self) -> list[FetchEnd]:
        """Cancel what is past its deadline; returns those that are over by that."""
        now = self._clock()
        late = [name for name, each in self._fetches.items() if each.deadline <= now]
        ends = [self.cancel(name, "its blocks did not arrive in time", FetchOutcome.OVERDUE) for name in late]
        return [end for end in ends if end is not None]

    def seconds_to_deadline(self) -> float | None:
        """Until the next fetch is overdue; None if none can be."""
        open_ones = [each.deadline for each in self._fetches.values() if each.state is not FetchState.ENDING]
        return max(0.0, min(open_ones) - self._clock()) if open_ones else None

    def take_cancels(self) -> dict[str, str]:
        """Fetches that every rank is to cancel, with the reason: each once."""
        cancels, self._to_cancel = self._to_cancel, {}
        return cancels

    def report(self, result: FetchResult, rank: int = 0) -> FetchEnd | None:
        """A rank's result. The end, if that was the last rank. Raises `CacheStateError` for one that owes no result."""
        fetch = self._fetches.get(result.request_id)
        if fetch is None or rank not in fetch.ranks_left:
            raise CacheStateError(
                f"rank {rank} reports the end of a fetch that it was not told of: {result.request_id}"
            )
        fetch.ranks_left.discard(rank)
        fetch.num_bytes += result.num_bytes
        fetch.seconds = max(fetch.seconds, result.seconds)
        if result.error is not None and fetch.state is FetchState.FETCHING:
            fetch.state, fetch.outcome, fetch.reason = FetchState.ENDING, FetchOutcome.FAILED, result.error
            if fetch.ranks_left:
                self._to_cancel[result.request_id] = result.error
        return None if fetch.ranks_left else self._end(result.request_id, fetch)

    def check(self) -> None:
        """Raises `InvariantError`."""
        for name, fetch in self._fetches.items():
            if bool(fetch.ranks_left) != (fetch.state is not FetchState.GRANTED):
                raise InvariantError(
                    f"the fetch of {name} is {fetch.state.value} with {len(fetch.ranks_left)} ranks left"
                )
        if lost := self._to_cancel.keys() - self._fetches.keys():
            raise InvariantError(f"fetches that are over are to be cancelled: {sorted(lost)}")

    def check_idle(self) -> None:
        """Raises `InvariantError` unless every fetch is over."""
        self.check()
        if self._fetches:
            raise InvariantError(f"fetches never ended: {', '.join(list(self._fetches)[:8])}")

    def _end(self, request_id: str, fetch: _Fetch) -> FetchEnd:
        del self._fetches[request_id]
        self._to_cancel.pop(request_id, None)
        self.totals.count(fetch.outcome)
        if fetch.outcome is FetchOutcome.ARRIVED:
            self.totals.num_bytes += fetch.num_bytes
            self.totals.seconds += fetch.seconds
        return FetchEnd(request_id, fetch.outcome, fetch.reason)


@dataclass(eq=False)
class _Lease:
    ranks_left: set[int]
    is_withdrawn: bool = False
    outcome: FetchOutcome = FetchOutcome.ARRIVED


class LeaseLedger(Ledger):
    """The prefill side: blocks stay with their request until every rank's lease has ended."""

    def __init__(self, *, num_ranks: int = 1) -> None:
        super().__init__()
        self._num_ranks = num_ranks
        self._leases: dict[str, _Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, lease: str) -> bool:
        return lease in self._leases

    def open(self, lease: str) -> None:
        """Every rank is told to open it. Raises `CacheStateError` for one that is open."""
        if lease in self._leases:
            raise CacheStateError(f"lease {lease} is open already")
        self._leases[lease] = _Lease(set(range(self._num_ranks)))
        self.totals.started += 1

    def withdraw(self, lease: str) -> bool:
        """Whether the ranks are to be told: False for one that has ended or was withdrawn."""
        known = self._leases.get(lease)
        if known is None or known.is_withdrawn:
            return False
        known.is_withdrawn = True
        return True

    def report(self, end: LeaseEnd, rank: int = 0) -> bool:
        """Whether the lease is over on every rank now. Raises `CacheStateError` for a rank that does not hold it."""
        lease = self._leases.get(end.lease)
        if lease is None or rank not in lease.ranks_left:
            raise CacheStateError(f"rank {rank} reports the end of lease {end.lease}, which it was not told of")
        lease.ranks_left.discard(rank)
        if end.error is not None and lease.outcome is FetchOutcome.ARRIVED:
            lease.outcome = FetchOutcome.CANCELLED if lease.is_withdrawn else FetchOutcome.FAILED
        if lease.ranks_left:
            return False
        del self._leases[end.lease]
        self.totals.count(lease.outcome)
        return True

    def check_idle(self) -> None:
        """Raises `InvariantError` unless every lease is over."""
        if self._leases:
            raise InvariantError(f"leases never ended: {', '.join(list(self._leases)[:8])}")
