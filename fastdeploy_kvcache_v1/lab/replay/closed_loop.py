"""A replay in simulated time, in which each turn of a session waits for the end of the turn before.

A trace has the arrival times at the server that recorded it. On another server later turns arrive at other times, so
only first turns arrive at their timestamps.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable

from ...errors import ConfigError
from .driver import Replay, ReplayedRequest, ReplayOptions
from .trace import TraceRequest


class ClosedLoop(Replay):
    """A step takes `step_ms` of simulated time, and a request a step per output token.

    A later turn arrives `delay_ms` after the end of the turn before. Without a delay in the trace, it is the difference
    of the timestamps minus the steps of the turn before, so a server without queues sees the trace's times. A request
    without room waits, and none ends early. Reads no clock. Holds the whole trace in memory. Not thread-safe.
    """

    def __init__(self, options: ReplayOptions) -> None:
        super().__init__(options)
        self._next_turns: dict[int, list[TraceRequest]] = defaultdict(list)
        """By the line of the turn before."""
        self._arrivals: list[tuple[float, int, TraceRequest]] = []
        """Heap by time and line."""
        self._ends: list[tuple[float, int, ReplayedRequest]] = []
        """The same for open requests."""

    def run(self, requests: Iterable[TraceRequest]) -> None:
        """Like `Replay.run`. Raises `ConfigError` for a trace without sessions."""
        self._take_trace(requests)
        while self._arrivals or self._line or self._open:
            self._end_due()
            self._let_arrive()
            ran = self._step()
            if not ran and self._line and not self._open:
                raise self._leak()
            self._advance(ran=ran)
        self._run_step([])
        self.manager.check_idle()

    def _take_trace(self, requests: Iterable[TraceRequest]) -> None:
        lines = set()
        for request in requests:
            lines.add(request.line)
            if request.after not in lines:
                self._arrivals.append((request.timestamp_ms, request.line, request))
            else:
                self._next_turns[request.after].append(request)
        if not self._next_turns:
            raise ConfigError(
                "--closed-loop needs sessions, and no line of the trace follows another one: "
                "it has no session_id, and no chat_id with parent_chat_id"
            )
        heapq.heapify(self._arrivals)

    def _let_arrive(self) -> None:
        while self._arrivals and self._arrivals[0][0] <= self.now_ms:
            arrived_ms, _, request = heapq.heappop(self._arrivals)
            if not self._queue(request):
                self._ended(request, arrived_ms)

    def _try_admit(self, opened: ReplayedRequest) -> bool:
        admitted = super()._try_admit(opened)
        if admitted:
            request = opened.request
            heapq.heappush(self._ends, (self.now_ms + self.options.service_ms(request), request.line, opened))
        return admitted

    def _arrive(self, request: TraceRequest) -> None:
        """Time passes by steps."""

    def _told_at_end(self, opened: ReplayedRequest) -> float | None:
        return opened.request.return_in_s

    def _make_room(self) -> bool:
        return False

    def _end_due(self) -> None:
        while self._ends and self._ends[0][0] <= self.now_ms:
            ended_ms, _, opened = heapq.heappop(self._ends)
            self._finish(opened)
            self._ended(opened.request, ended_ms)

    def _ended(self, request: TraceRequest, ended_ms: float) -> None:
        """Let the next turns of its session arrive."""
        for following in self._next_turns.pop(request.line, ()):
            arrival = ended_ms + self.options.delay_ms(request, following)
            heapq.heappush(self._arrivals, (arrival, following.line, following))

    def _advance(self, *, ran: bool) -> None:
        """Advance by a step, or to the next event if no request ran."""
        after_step = self.now_ms + self.options.step_ms
        if ran:
            self.now_ms = after_step
        elif self._arrivals or self._ends:
            self.now_ms = min(heap[0][0] for heap in (self._arrivals, self._ends) if heap)
