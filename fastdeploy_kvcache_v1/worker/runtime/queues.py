"""CPU streams on the queues of the compiled core: copies start, run and finish without the GIL."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial

from ...errors import CacheStateError, TransferError
from ..ops.library import Library
from ..ops.queues import Queue
from ..ops.queues import QueueEvent as RawEvent
from .base import Event, Stream, describe

_SLICE_S = 0.05
"""Longest stretch of a wait in which the thread cannot be interrupted (Ctrl-C)."""


class QueueEvent(Event):
    """Wraps an event of the core."""

    def __init__(self, raw: RawEvent) -> None:
        self.raw = raw

    def done(self) -> bool:
        return self.raw.wait(0)

    @property
    def error(self) -> BaseException | None:
        error = self.raw.error if self.done() else None
        if error is not None and self.raw.is_inherited:
            return TransferError(f"the copy it depends on failed: {describe(error)}")
        return error

    def wait_done(self, timeout: float | None = None) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = _SLICE_S if deadline is None else min(_SLICE_S, max(0.0, deadline - time.monotonic()))
            if self.raw.wait(int(left * 1e9)):
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, QueueEvent)
        assert earlier.done()
        assert self.done()
        return max(0, self.raw.time_ns - earlier.raw.time_ns) / 1e9


class QueueStream(Stream):
    """A queue, made with the first work, in the process that submits it; after a fork the child makes its own.

    `handle` is the queue's id: what is enqueued on it takes its turn among the Python functions that are submitted.
    """

    def __init__(self, library: Library, name: str, delay: Callable[[str], None] | None = None) -> None:
        self.name = name
        self._library = library
        self._delay = delay
        self._queue: Queue | None = None
        self._pid = 0
        self._closed = False

    def begin(self) -> None:
        self._open().begin()

    def submit(self, fn: Callable[..., object], *args: object) -> None:
        self._call_delay()
        self._open().call(partial(fn, *args))

    def enqueue(self, copy: Callable[..., object], *args: object) -> None:
        self._call_delay()
        queue = self._open()
        try:
            copy(*args, stream=queue.id)
        except Exception as error:  # as on the stream's thread: the unit fails, the stream goes on
            queue.call(partial(_raise, error))

    def wait_event(self, event: Event, *, needs_data: bool = False, timeout: float | None = None) -> None:
        if isinstance(event, QueueEvent):
            self._open().wait(event.raw, needs_data=needs_data)
        elif not event.done() or (needs_data and event.error is not None):
            self._open().call(partial(_wait, event, needs_data), always=True)

    def record_event(self, *, timed: bool = False) -> QueueEvent:
        return QueueEvent(self._open().record())

    def synchronize(self) -> None:
        if not self._closed:
            self.record_event().wait_done()

    def close(self) -> None:
        self._closed = True
        queue, self._queue = self._queue, None
        if queue is not None and self._pid == os.getpid():
            queue.close()

    @property
    def closed(self) -> bool:
        return self._closed

    def _open(self) -> Queue:
        if self._closed:
            raise CacheStateError(f"stream {self.name} is closed")
        if self._queue is None or self._pid != os.getpid():
            self._pid = os.getpid()
            self._queue = Queue(self._library, self.name)
            self.handle = self._queue.id
        return self._queue

    def _call_delay(self) -> None:
        if self._delay is not None:
            self._open().call(partial(self._delay, self.name))


def _raise(error: Exception) -> None:
    raise error


def _wait(event: Event, needs_data: bool) -> None:
    event.wait_done()
    if needs_data and event.error is not None:
        raise TransferError(f"the copy it depends on failed: {describe(event.error)}")
