"""Progress and prefill times of a rank's forward passes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from ...contract.messages import PassProgress, PrefillTime
from ...worker.runtime import Event, Stream
from ..transport import TaskKind

EVERY_S = 0.02
"""Least time between two reports of progress alone: passes of a small model take a millisecond."""

IDLE_EVERY_S = 0.25
"""Time between two reports of an idle rank. The engine may need the repetition to decide about newer slots."""


class PassTracker:
    """Reports by time which passes have ended, because FastDeploy sends no message for a decode pass.

    A slot is quiet when it was free at a time, no row writes to it after a certain step, and every earlier pass has
    ended on the device. Never waits. Not thread-safe: the worker's event loop uses it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._step = -1
        self._running: deque[tuple[Event | None, PassProgress]] = deque()
        self._ended: PassProgress | None = None
        self._told: PassProgress | None = None

    def taken(self, step: int) -> None:
        """The batch that carries `step` has arrived: its rows are known before the next pass is submitted."""
        self._step = step

    def submitted(self, event: Event | None = None) -> None:
        """`event` is done when this pass and all earlier ones have ended. None: they have."""
        self._running.append((event, PassProgress(self._step, self._clock())))

    def forget(self) -> None:
        """Drop all passes: they have ended, and the tensors are about to be freed."""
        self._running.clear()

    def news(self, *, is_idle: bool) -> PassProgress | None:
        """Progress to report now, or None. `is_idle`: no row computes before the next batch arrives."""
        while self._running:
            event, progress = self._running[0]
            if event is not None and not event.done():
                break
            self._running.popleft()
            self._ended = progress
        latest = PassProgress(self._step, self._clock(), True) if is_idle and not self._running else self._ended
        if latest is None or not self._is_worth_telling(latest):
            return None
        self._told = latest
        return latest

    def _is_worth_telling(self, progress: PassProgress) -> bool:
        told = self._told
        if told is None or (progress.step, progress.is_idle) != (told.step, told.is_idle):
            return True
        return progress.at - told.at >= (IDLE_EVERY_S if progress.is_idle else EVERY_S)


Chunks = list[tuple[int, int]]


class PrefillTimer:
    """Measures prefill passes between two events on the compute stream. A pass that waits for copies layer by layer
    is left out, because its waits cannot be subtracted. Never waits. Not thread-safe: the worker's event loop uses it.
    """

    def __init__(self) -> None:
        self._announced: dict[int, tuple[int, int]] = {}
        """By row: tokens `[start, end)` of its prompt that the next pass computes."""
        self._open: tuple[Event, Chunks] | None = None
        self._running: deque[tuple[Event, Event, Chunks]] = deque()

    def received(self, tasks: Iterable[Any]) -> None:
        for task in tasks:
            kind = task.task_type.value
            if kind == TaskKind.PREFILL:
                self._announced[task.idx] = (int(task.prefill_start_index), int(task.prefill_end_index))
            elif kind != TaskKind.DECODE and kind != TaskKind.EXTEND:
                self._announced.pop(task.idx, None)

    def begin(self, stream: Stream, *, waits_inside: bool) -> None:
        """Call before the pass is submitted, after its waits for the first layer are on the stream."""
        chunks = list(self._announced.values())
        self._announced.clear()
        self._open = (stream.record_event(timed=True), chunks) if chunks and not waits_inside else None

    def end(self, stream: Stream) -> None:
        if self._open is not None:
            started, chunks = self._open
            self._running.append((started, stream.record_event(timed=True), chunks))
            self._open = None

    def forget(self) -> None:
        self._announced.clear()
        self._open = None
        self._running.clear()

    def take(self) -> tuple[PrefillTime, ...]:
        """Prefill passes that ended since the last call, in order."""
        ended = []
        while self._running and self._running[0][1].done():
            started, finished, chunks = self._running.popleft()
            if finished.error is None:
                ended.append(PrefillTime.of(chunks, finished.seconds_since(started)))
        return tuple(ended)
