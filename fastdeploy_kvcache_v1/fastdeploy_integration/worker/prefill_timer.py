"""PrefillTimer: how long the device takes for the passes that compute prompts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from ...contract.messages import PrefillTime
from ...worker.runtime import Event, Stream
from ..transport import TaskKind

Chunks = list[tuple[int, int]]


class PrefillTimer:
    """Between two events on the compute stream. A pass that waits for copies layer by layer is left out: on a device
    nobody knows how long it waited. Nor does anything here wait. Not thread-safe: the worker's event loop uses it.
    """

    def __init__(self) -> None:
        self._announced: dict[int, tuple[int, int]] = {}
        """By row: tokens `[start, end)` that the next pass computes of its prompt."""
        self._open: tuple[Event, Chunks] | None = None
        self._running: deque[tuple[Event, Event, Chunks]] = deque()

    def received(self, tasks: Iterable[Any]) -> None:
        """A batch has arrived."""
        for task in tasks:
            kind = task.task_type.value
            if kind == TaskKind.PREFILL:
                self._announced[task.idx] = (int(task.prefill_start_index), int(task.prefill_end_index))
            elif kind != TaskKind.DECODE and kind != TaskKind.EXTEND:
                self._announced.pop(task.idx, None)

    def begin(self, stream: Stream, *, waits_inside: bool) -> None:
        """A pass is about to be submitted; what it waits for before its first layer is on the stream already."""
        chunks = list(self._announced.values())
        self._announced.clear()
        self._open = (stream.record_event(timed=True), chunks) if chunks and not waits_inside else None

    def end(self, stream: Stream) -> None:
        """It was submitted."""
        if self._open is not None:
            started, chunks = self._open
            self._running.append((started, stream.record_event(timed=True), chunks))
            self._open = None

    def forget(self) -> None:
        """The tensors are about to go."""
        self._announced.clear()
        self._open = None
        self._running.clear()

    def take(self) -> tuple[PrefillTime, ...]:
        """The passes that have ended since the last call, in order."""
        ended = []
        while self._running and self._running[0][1].done():
            started, finished, chunks = self._running.popleft()
            if finished.error is None:
                ended.append(PrefillTime.of(chunks, finished.seconds_since(started)))
        return tuple(ended)
