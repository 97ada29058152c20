"""Queues of the compiled core: a FIFO with a thread of its own that needs no GIL to copy."""

from __future__ import annotations

import atexit
import ctypes
import itertools
import logging
import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple

from .library import Callback, Library

logger = logging.getLogger(__name__)

REMEMBERED_FAILURES = 1000
"""Exceptions kept for those who ask an event about them; of older ones only the fact remains."""


class QueueEvent:
    """A point in a queue. Thread-safe."""

    def __init__(self, library: Library, handle: ctypes.c_void_p) -> None:
        self._raw = library.raw
        self.handle = handle
        weakref.finalize(self, library.raw.kvswap_event_free, handle).atexit = False

    def wait(self, timeout_ns: int) -> bool:
        """True once it happened; 0 looks once, a negative timeout waits for ever (and cannot be interrupted)."""
        return bool(self._raw.kvswap_event_wait(self.handle, timeout_ns))

    @property
    def error(self) -> BaseException | None:
        """Why the covered work failed. Only after it happened."""
        return _failure(self._raw.kvswap_event_failure(self.handle))

    @property
    def is_inherited(self) -> bool:
        """The failure is that of a copy this one depends on. Only after it happened."""
        return int(self._raw.kvswap_event_failure(self.handle)) < 0

    @property
    def time_ns(self) -> int:
        """Monotonic. Only after it happened."""
        return int(self._raw.kvswap_event_time_ns(self.handle))


def call_on(library: Library, queue: int, fn: Callable[[], object], *, always: bool = False) -> None:
    """Run `fn()` on the thread of `queue` in its turn; what it raises is logged and fails the unit."""
    ticket = next(_tickets)
    _pending[ticket] = _Call(fn, always)
    try:
        library.call("kvswap_queue_call", queue, _call_back, ticket)
    except BaseException:
        _pending.pop(ticket, None)
        raise


class Queue:
    """See `kvswap.h`. `id` is the raw handle that the copy ops take as `stream`. Not usable in a forked child."""

    def __init__(self, library: Library, name: str) -> None:
        self._library = library
        handle = ctypes.c_uint64()
        library.call("kvswap_queue_create", name.encode(), ctypes.byref(handle))
        self.id = handle.value

    def begin(self) -> None:
        self._library.call("kvswap_queue_begin", self.id)

    def call(self, fn: Callable[[], object], *, always: bool = False) -> None:
        """See `call_on`."""
        call_on(self._library, self.id, fn, always=always)

    def wait(self, event: QueueEvent, *, needs_data: bool) -> None:
        self._library.call("kvswap_queue_wait", self.id, event.handle, int(needs_data))

    def record(self) -> QueueEvent:
        handle = ctypes.c_void_p()
        self._library.call("kvswap_queue_record", self.id, ctypes.byref(handle))
        return QueueEvent(self._library, handle)

    def close(self) -> None:
        """Finishes what was submitted. Once."""
        self._library.call("kvswap_queue_close", self.id)


class _Call(NamedTuple):
    fn: Callable[[], object]
    always: bool
    """Also in a unit that has failed."""


_tickets = itertools.count(1)
_pending: dict[int, _Call] = {}
_failures: dict[int, BaseException] = {}
_failures_lock = threading.Lock()


def _run(ticket: int, failed: int) -> int:
    call = _pending.pop(ticket)
    if failed and not call.always:
        return 0
    try:
        call.fn()
    except BaseException as error:  # thread edge: the unit fails, the queue goes on
        logger.exception("work on a queue failed")
        _remember(ticket, error.with_traceback(None))
        return ticket
    return 0


def _remember(ticket: int, error: BaseException) -> None:
    with _failures_lock:  # several queues fail at once
        _failures[ticket] = error
        if len(_failures) > REMEMBERED_FAILURES:
            del _failures[next(iter(_failures))]


_call_back = Callback(_run)


def _failure(code: int) -> BaseException | None:
    if code == 0:
        return None
    return _failures.get(abs(code)) or RuntimeError("the copy failed long ago")


def stop_at_exit(library: Library) -> None:
    """A queue that calls into an interpreter that is gone, or copies memory of its objects, would crash the process."""
    atexit.register(library.raw.kvswap_queue_stop)
