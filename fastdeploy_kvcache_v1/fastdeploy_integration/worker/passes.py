"""What a rank's forward passes take, and how far they are."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from ...contract.messages import PassProgress, PrefillTime
from ...worker.runtime import Event, Stream
from ..transport import TaskKind

EVERY_S = 0.02
"""News of passes alone are told at most so often: passes of a small model take a millisecond."""

IDLE_EVERY_S = 0.25
"""A rank that is idle says so again: what the engine was not sure of may have been decided since."""


class PassTracker:
    """FastDeploy sends no message for a decode pass. So passes are told by time: a slot that was free at a time, and
    that no row wrote to any more once the rank had taken a certain step, is quiet when every pass from before has
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
        """A pass was submitted: `event` comes when it has ended, and all before it. None: they have."""
        self._running.append((event, PassProgress(self._step, self._clock())))

    def forget(self) -> None:
        """Every pass has ended: the tensors are about to go."""
        self._running.clear()

    def news(self, *, is_idle: bool) -> PassProgress | None:
        """What the engine should be told now, None for nothing. `is_idle`: no row computes before a batch arrives."""
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
