"""Copies that end when the chooser says so: streams without threads, whose every interleaving replays from its seed."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from fastdeploy_kvcache_v1.errors import CacheStateError, TransferError
from fastdeploy_kvcache_v1.worker.runtime import CpuRuntime, Event, Stream
from fastdeploy_kvcache_v1.worker.runtime.base import describe


class ChosenEvent(Event):
    """Waiting for it lets streams go on, in any order, until it has happened."""

    def __init__(self, runtime: ChosenRuntime) -> None:
        self._runtime = runtime
        self._ended_at: int | None = None
        self._error: BaseException | None = None

    def finish(self, error: BaseException | None) -> None:
        self._ended_at, self._error = self._runtime.now, error

    def done(self) -> bool:
        return self._ended_at is not None

    @property
    def error(self) -> BaseException | None:
        return self._error

    def wait_done(self, timeout: float | None = None) -> bool:
        while not self.done():
            if timeout is not None and self._runtime.is_late():
                return False
            if not self._runtime.go_on():
                assert timeout is not None, "it waits for what will never happen"
                return False
        return True

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, ChosenEvent)
        return float(self._ended_at - earlier._ended_at)


class ChosenStream(Stream):
    def __init__(self, name: str, runtime: ChosenRuntime) -> None:
        self.name = name
        self._runtime = runtime
        self._work: deque[Callable[[], None]] = deque()
        self._held_by: deque[Event | None] = deque()
        """What each piece of work waits for."""
        self._failure: BaseException | None = None
        self.closed = False

    def begin(self) -> None:
        self._post(partial(setattr, self, "_failure", None))

    def submit(self, fn: Callable[..., object], *args: object) -> None:
        self._post(partial(self._call, fn, args))

    enqueue = submit

    def wait_event(self, event: Event, *, needs_data: bool = False, timeout: float | None = None) -> None:
        self._post(partial(self._take_over, event, needs_data), event)

    def record_event(self, *, timed: bool = False) -> Event:
        event = ChosenEvent(self._runtime)
        self._post(lambda: event.finish(self._failure))
        return event

    def synchronize(self) -> None:
        if not self.closed:
            self.record_event().wait_done()

    def close(self) -> None:
        while self._work:
            assert self._runtime.go_on()
        self.closed = True

    def _post(self, work: Callable[[], None], held_by: Event | None = None) -> None:
        if self.closed:
            raise CacheStateError(f"stream {self.name} is closed")
        self._work.append(work)
        self._held_by.append(held_by)

    @property
    def can_go_on(self) -> bool:
        is_held = self.name in self._runtime.held
        return bool(self._work) and not is_held and (self._held_by[0] is None or self._held_by[0].done())

    def go_on(self) -> None:
        self._held_by.popleft()
        self._work.popleft()()

    def _call(self, fn: Callable[..., object], args: tuple[object, ...]) -> None:
        if self._failure is None:
            try:
                self._runtime.may_fail(self.name)
                fn(*args)
            except Exception as error:
                self._failure = error

    def _take_over(self, event: Event, needs_data: bool) -> None:
        if needs_data and self._failure is None and event.error is not None:
            self._failure = TransferError(f"the copy it depends on failed: {describe(event.error)}")


class ChosenRuntime(CpuRuntime):
    """Copies go on at each `turn`, and where something waits for them; `fail` and `late` are the rates of copies that
    fail, and of waits that are given up. As on a CPU: a failure is known when it happens. Who waits with a time-out for
    what cannot go on is late at once.
    """

    def __init__(self, seed: int = 0, *, fail: float = 0.0, late: float = 0.0, **options: Any) -> None:
        self._random = random.Random(seed)
        self.fail, self.late = fail, late
        self.now = 0
        self.held: set[str] = set()
        """Streams that stand still, by name."""
        self._errors: dict[str, list[Exception]] = {}
        super().__init__(**options)

    def hold(self, stream: str) -> Callable[[], None]:
        """`stream` stands still until the result is called."""
        self.held.add(stream)
        return partial(self.held.discard, stream)

    def fail_next(self, stream: str, error: Exception) -> None:
        """The next copy of `stream` that no other error waits for fails with this one."""
        self._errors.setdefault(stream, []).append(error)

    def new_stream(self, name: str) -> ChosenStream:
        self._streams = [*(stream for stream in self._streams if not stream.closed), ChosenStream(name, self)]
        return self._streams[-1]

    def turn(self) -> None:
        """Some of what was submitted happens."""
        while self._random.random() < 0.6 and self.go_on():
            pass

    def go_on(self) -> bool:
        """The next piece of work of some stream. False if no stream can go on."""
        streams = [stream for stream in self._streams if stream.can_go_on]
        if streams:
            self.now += 1
            self._random.choice(streams).go_on()
        return bool(streams)

    def is_late(self) -> bool:
        return self._random.random() < self.late

    def may_fail(self, stream: str) -> None:
        if self._errors.get(stream):
            raise self._errors[stream].pop(0)
        if self._random.random() < self.fail:
            raise RuntimeError("injected")

    def quiet(self) -> None:
        """From now on nothing fails, and what is waited for comes."""
        self.fail = self.late = 0.0

    def close(self) -> None:
        self.held.clear()
        super().close()
