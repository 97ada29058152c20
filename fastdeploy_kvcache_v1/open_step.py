"""OpenStep: what the scheduling step that is being decided, and the one taken last, owe their requests."""

from __future__ import annotations

from collections.abc import Iterable, Set

from .cache_stats import Counters
from .metadata import DeviceSlot
from .request_state import RequestState


class OpenStep:
    """Admissions not counted yet, because they may be rolled back or their swap-in may fail, and blocks whose KV this
    step computes.

    Not thread-safe: the manager's lock covers it.
    """

    def __init__(self, counters: Counters) -> None:
        self.number = 0
        self._counters = counters
        self._admitted: dict[str, RequestState] = {}
        """In this step: may be rolled back."""
        self._unsettled: dict[str, RequestState] = {}
        """In the step taken last: a swap-in may still fail, and its hits would be none."""
        self._in_flight: dict[str, int] = {}
        """Leading blocks of a request that are matchable from the next step on."""

    def admit(self, request: RequestState) -> None:
        self._admitted[request.request_id] = request

    def roll_back(self, request_id: str) -> None:
        """An admitted request was not scheduled after all. Once its step is taken it counts nevertheless."""
        self._counters.requests_rolled_back += 1
        self._admitted.pop(request_id, None)

    def commit_later(self, request_id: str, num_blocks: int) -> None:
        self._in_flight[request_id] = max(num_blocks, self._in_flight.get(request_id, 0))

    def end(self, request_id: str) -> None:
        """The request is over: it was admitted, and what the step would have computed of it never counts."""
        self._in_flight.pop(request_id, None)
        for admissions in (self._admitted, self._unsettled):
            if (request := admissions.pop(request_id, None)) is not None:
                self._count(request)

    def void(self, request_ids: Iterable[str], slots: Set[DeviceSlot]) -> None:
        """These requests, and those whose table has one of `slots`, were served nothing: their next attempt counts."""
        given_up = set(request_ids)
        for admissions in (self._admitted, self._unsettled):
            for request_id, request in list(admissions.items()):
                if request_id in given_up or not slots.isdisjoint(request.table):
                    del admissions[request_id]

    def close(self) -> dict[str, int]:
        """Begin the next step; returns how many blocks of which request are now to be committed."""
        self.number += 1
        for request in self._unsettled.values():
            self._count(request)
        self._unsettled, self._admitted = self._admitted, {}
        in_flight, self._in_flight = self._in_flight, {}
        return in_flight

    def named_requests(self) -> set[str]:
        """Requests it still owes something, for checks."""
        return self._admitted.keys() | self._unsettled.keys() | self._in_flight.keys()

    def _count(self, request: RequestState) -> None:
        counters = self._counters
        counters.requests_admitted += 1
        counters.query_tokens += request.num_query_tokens
        counters.device_hit_tokens += request.num_device_tokens
        counters.host_hit_tokens += request.num_host_tokens
