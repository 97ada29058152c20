"""OpenStep: admissions of the scheduling step that is being decided, and of the one taken last."""

from __future__ import annotations

from collections.abc import Iterable, Set

from ..metadata import DeviceSlot
from .cache_stats import Counters
from .request_state import RequestState


class OpenStep:
    """Admissions not counted yet, because they may be rolled back or their swap-in may fail.

    Not thread-safe: the manager's lock covers it.
    """

    def __init__(self, counters: Counters) -> None:
        self.number = 0
        self._counters = counters
        self._admitted: dict[str, RequestState] = {}
        """In this step: may be rolled back."""
        self._unsettled: dict[str, RequestState] = {}
        """In the step taken last: a swap-in may still fail, and its hits would be none."""

    @property
    def admitted(self) -> Iterable[RequestState]:
        """Requests that this step admits."""
        return self._admitted.values()

    def admit(self, request: RequestState) -> None:
        self._admitted[request.request_id] = request

    def take_back(self, request_id: str) -> bool:
        """A request was not scheduled after all. False once its step is taken: then it counts nevertheless."""
        return self._admitted.pop(request_id, None) is not None

    def end(self, request_id: str) -> None:
        """The request is over: if it was admitted, that counts."""
        for admissions in (self._admitted, self._unsettled):
            if (request := admissions.pop(request_id, None)) is not None:
                self._count(request)

    def void(self, request_ids: Iterable[str], slots: Set[DeviceSlot]) -> None:
        """These requests, and others that read one of `slots`, were served nothing: their next attempt counts."""
        given_up = set(request_ids)
        for admissions in (self._admitted, self._unsettled):
            for request_id, request in list(admissions.items()):
                if request_id in given_up or (slots and not slots.isdisjoint(request.block_table())):
                    del admissions[request_id]

    def close(self) -> None:
        """Begin the next step."""
        self.number += 1
        for request in self._unsettled.values():
            self._count(request)
        self._unsettled, self._admitted = self._admitted, {}

    def named_requests(self) -> set[str]:
        """Requests whose admission it still has to count, for checks."""
        return self._admitted.keys() | self._unsettled.keys()

    def _count(self, request: RequestState) -> None:
        counters = self._counters
        if request.resumed:
            counters.requests_resumed += 1
            counters.resumed_hit_tokens += request.num_device_tokens + request.num_host_tokens
            return
        counters.requests_admitted += 1
        counters.query_tokens += request.num_query_tokens
        counters.device_hit_tokens += request.num_device_tokens
        counters.host_hit_tokens += request.num_host_tokens
