"""TracedRequests: which of FastDeploy's requests the recorded trace is to have, from first batch to end."""

from __future__ import annotations

import time
from typing import Any

from ...telemetry.trace_recorder import Ticket, TraceRecorder
from .task_tokens import TaskTokens


class TracedRequests:
    """A request that was preempted keeps its ticket. The adapter's lock covers it."""

    def __init__(self, recorder: TraceRecorder) -> None:
        self._recorder = recorder
        self._open: dict[str, tuple[TaskTokens, Ticket]] = {}

    def scheduled(self, tokens: TaskTokens) -> None:
        """A batch computes tokens of the request. Its first one decides its place in the trace."""
        request_id = tokens.task.request_id
        known = self._open.get(request_id)
        if known is not None and known[0].task is tokens.task:
            self._open[request_id] = (tokens, known[1])
            return
        self.ended(request_id)  # ids come from clients
        self._open[request_id] = (tokens, self._recorder.arrived(_age_s(tokens.task)))

    def ended(self, request_id: str) -> None:
        """It is complete, or aborted, also while it was preempted. Unknown requests are ignored."""
        known = self._open.pop(request_id, None)
        if known is None:
            return
        tokens, ticket = known
        tokens.catch_up()
        self._recorder.ended(ticket, tokens, tokens.num_prompt_tokens)

    def all_ended(self) -> None:
        """FastDeploy has answered or dropped every request; of some it has said nothing since they were preempted."""
        for request_id in list(self._open):
            self.ended(request_id)


def _age_s(task: Any) -> float:
    """Since FastDeploy's API server took the request, by the clock of the day."""
    arrived_s: float | None = task.metrics.arrival_time
    return 0.0 if arrived_s is None else max(0.0, time.time() - arrived_s)
