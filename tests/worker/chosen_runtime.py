"""Copies that end when the chooser says so: streams without threads, whose every interleaving replays from its seed."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from fastdeploy_kvcache_v1.errors import CacheStateError
from fastdeploy_kvcache_v1.worker.runtime import CpuRuntime, Event
from fastdeploy_kvcache_v1.worker.runtime.cpu import CpuEvent, CpuStream


class ChosenEvent(CpuEvent):
    """Waiting for it lets streams go on, in any order, until it has happened."""

    def __init__(self, runtime: ChosenRuntime) -> None:
        super().__init__()
        self._runtime = runtime

    def finish(self, error: BaseException | None = None) -> None:
        super().finish(error)
        self._time = float(self._runtime.now)

    def wait_done(self, timeout: float | None = None) -> bool:
        while not self.done():
            if not self._runtime.go_on():
                assert timeout is not None, "it waits for what will never happen"
                return False
        return True


class ChosenStream(CpuStream):
    def __init__(self, name: str, runtime: ChosenRuntime) -> None:
        super().__init__(name, delay=runtime.may_fail)
        self._runtime = runtime
        self._work: deque[tuple[Callable[[], None], Event | None]] = deque()
        """Each piece, and what it waits for."""

    def wait_event(self, event: Event, *, needs_data: bool = False, timeout: float | None = None) -> None:
        self._post(partial(self._on_wait, event, needs_data), event)

    def record_event(self, *, timed: bool = False) -> Event:
        event = ChosenEvent(self._runtime)
        self._post(partial(self._on_record, event))
        return event

    def close(self) -> None:
        while self._work:
            assert self._runtime.go_on()
        self._closed = True

    def _post(self, op: Callable[[], None], held_by: Event | None = None) -> None:
        if self._closed:
            raise CacheStateError(f"stream {self.name} is closed")
        self._work.append((op, held_by))

    @property
    def can_go_on(self) -> bool:
        if not self._work or self.name in self._runtime.held:
            return False
        held_by = self._work[0][1]
        return held_by is None or held_by.done()

    def go_on(self) -> None:
        self._work.popleft()[0]()


class ChosenRuntime(CpuRuntime):
    """Copies go on where something waits for them. As on a CPU: a failure is known when it happens.
    Who waits with a time-out for what cannot go on is late at once.
    """

    def __init__(self, seed: int = 0, *, late_compute: bool = False, **options: Any) -> None:
        self._random = random.Random(seed)
        self.now = 0
        self.held: set[str] = set()
        """Streams that stand still, by name."""
        self._errors: dict[str, list[Exception]] = {}
        self.streams: list[ChosenStream] = []
        super().__init__(**options)
        if late_compute:
            self.compute_stream = self.new_stream("compute")

    def hold(self, stream: str) -> Callable[[], None]:
        """`stream` stands still until the result is called."""
        self.held.add(stream)
        return partial(self.held.discard, stream)

    def fail_next(self, stream: str, error: Exception) -> None:
        """The next copy of `stream` that no other error waits for fails with this one."""
        self._errors.setdefault(stream, []).append(error)

    def new_stream(self, name: str) -> ChosenStream:
        self.streams.append(ChosenStream(name, self))
        return self.streams[-1]

    def go_on(self) -> bool:
        """The next piece of work of some stream. False if no stream can go on."""
        streams = [stream for stream in self.streams if stream.can_go_on]
        if streams:
            self.now += 1
            self._random.choice(streams).go_on()
        return bool(streams)

    def may_fail(self, stream: str) -> None:
        if self._errors.get(stream):
            raise self._errors[stream].pop(0)
