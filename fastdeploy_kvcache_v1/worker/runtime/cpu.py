"""Streams and events on a CPU. A copy stream is a thread with a FIFO; compute is the calling thread itself."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue

from ...contract.messages import CopyPath
from ...errors import CacheStateError, LayerSwapTimeoutError, TransferError
from .. import ops
from ..ops.copies import Copies, CpuCopies, chosen, cpu_paths
from ..ops.paddle_ops import PaddleCopies
from ..ops.rows import LayerRows
from .base import Event, Runtime, Stream, describe, free_host_memory, require
from .placement import allocate_near

logger = logging.getLogger(__name__)


class CpuEvent(Event):
    def __init__(self) -> None:
        self._finished = threading.Event()
        self._error: BaseException | None = None
        self._time = 0.0

    def finish(self, error: BaseException | None = None) -> None:
        assert not self._finished.is_set(), "an event finishes once"
        self._error = error
        self._time = time.perf_counter()
        self._finished.set()

    def done(self) -> bool:
        return self._finished.is_set()

    @property
    def error(self) -> BaseException | None:
        return self._error if self._finished.is_set() else None

    def wait_done(self, timeout: float | None = None) -> bool:
        return self._finished.wait(timeout)

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, CpuEvent)
        assert earlier.done()
        assert self.done()
        return max(0.0, self._time - earlier._time)


class InlineStream(Stream):
    """The calling thread as a stream: work runs in the call, failures raise."""

    def __init__(self, name: str) -> None:
        self.name = name

    def begin(self) -> None:
        """No failure outlives a call."""

    def submit(self, fn: Callable[..., object], *args: object) -> None:
        fn(*args)

    def wait_event(self, event: Event, *, needs_data: bool = False, timeout: float | None = None) -> None:
        start = time.perf_counter()
        is_done = event.wait_done(timeout)
        self.waited_s += time.perf_counter() - start
        if not is_done:
            raise LayerSwapTimeoutError(f"stream {self.name} waited more than {timeout} s for a copy")
        if needs_data:
            event.raise_if_failed()

    def record_event(self, *, timed: bool = False) -> Event:
        event = CpuEvent()
        event.finish()
        return event

    def synchronize(self) -> None:
        """Always up to date."""

    def close(self) -> None:
        """Nothing to release."""


class CpuStream(Stream):
    """A daemon thread with a FIFO. It starts with the first work, so a process may fork before."""

    def __init__(self, name: str, delay: Callable[[str], None] | None = None) -> None:
        self.name = name
        self._delay = delay
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._failure: BaseException | None = None  # of the current unit; only the stream's thread touches it

    def begin(self) -> None:
        self._post(self._on_begin)

    def submit(self, fn: Callable[..., object], *args: object) -> None:
        self._post(partial(self._on_call, fn, args))

    def wait_event(self, event: Event, *, needs_data: bool = False, timeout: float | None = None) -> None:
        self._post(partial(self._on_wait, event, needs_data))

    def record_event(self, *, timed: bool = False) -> Event:
        event = CpuEvent()
        self._post(partial(self._on_record, event))
        return event

    def synchronize(self) -> None:
        if not self._closed:
            self.record_event().wait_done()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._queue.put(None)
        if self._thread is not None:
            self._thread.join()

    def _post(self, op: Callable[[], None]) -> None:
        if self._closed:
            raise CacheStateError(f"stream {self.name} is closed")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
            self._thread.start()
        self._queue.put(op)

    def _run(self) -> None:
        while (op := self._queue.get()) is not None:
            op()

    def _on_begin(self) -> None:
        self._failure = None

    def _on_call(self, fn: Callable[..., object], args: tuple[object, ...]) -> None:
        if self._failure is not None:
            return
        try:
            if self._delay is not None:
                self._delay(self.name)
            fn(*args)
        except BaseException as error:  # thread edge: the unit fails, the stream goes on
            logger.exception("work on stream %s failed", self.name)
            self._failure = error

    def _on_wait(self, event: Event, needs_data: bool) -> None:
        event.wait_done()
        if needs_data and self._failure is None and event.error is not None:
            self._failure = TransferError(f"an earlier copy failed: {describe(event.error)}")

    def _on_record(self, event: CpuEvent) -> None:
        event.finish(self._failure)


class CpuRuntime(Runtime):
    """Threads as copy streams."""

    on_gpu = False

    def __init__(self, *, delay: Callable[[str], None] | None = None) -> None:
        """`delay(stream_name)` runs on the stream's thread before each submitted function, for tests."""
        self._delay = delay
        self.compute_stream: Stream = InlineStream("compute")

    def new_stream(self, name: str) -> CpuStream:
        return CpuStream(name, self._delay)

    def new_copies(self, device: Sequence[LayerRows], host: Sequence[LayerRows]) -> Copies:
        return PaddleCopies(device, host) if chosen() == "paddle" else CpuCopies(device, host)

    def copy_paths(self) -> tuple[CopyPath, ...]:
        return cpu_paths()

    def allocate_host(self, nbytes: int, *, shared: bool = False) -> ops.HostBuffer:
        return allocate_near(nbytes, shared=shared)

    def free_host(self, buffer: ops.HostBuffer) -> None:
        buffer.free()

    def require_memory(self, *, device_bytes: int, host_bytes: int) -> None:
        free = free_host_memory()
        require("the device cache", device_bytes, free)
        require("the host cache (swap space)", host_bytes, free - device_bytes)
