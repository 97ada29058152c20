"""Streams and events on an NVIDIA GPU through CuPy, which is imported only when a `CudaRuntime` is made."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ...errors import CacheStateError, ConfigError, LayerSwapTimeoutError, TransferError
from .. import ops
from ..ops import trial
from ..ops.copies import Copies, chosen
from ..ops.cuda_copies import CudaCopies
from ..ops.driver import driver
from ..ops.paddle_ops import PaddleCopies
from ..ops.rates import Rates
from ..ops.rows import LayerRows
from .base import Event, Runtime, Stream, describe, free_host_memory, require
from .placement import allocate_near, cpus_near

logger = logging.getLogger(__name__)

_SUCCESS, _NOT_READY = 0, 600
"""cudaSuccess and cudaErrorNotReady, the two healthy answers of cudaEventQuery."""

PORTABLE, MAPPED = 1, 2
"""cudaHostRegisterPortable and cudaHostRegisterMapped: every context may copy from it, kernels may reach it."""

MOST_OPEN = 256
"""Calls of a stream that may be queued while others keep the interpreter lock; a queue of the driver holds 1,024."""

LOOK_EVERY = 32
"""Calls of a stream from one event that is asked for to the next, and from one question to the next."""

_POLL_S = 0.0002
"""Sleep between two looks at an event; CUDA has no timed wait."""


class CudaEvent(Event):
    """Wraps a `cupy.cuda.Event`; also carries a failure known at submission, which the GPU never sees."""

    _done = False

    def __init__(self, cupy: Any, event: Any, failure: BaseException | None, spare: list[Any]) -> None:
        """`spare`: where `event` goes when nobody asks for this one any more, to be recorded anew."""
        self._cupy = cupy
        self.raw = event
        self.early_error = failure
        """What is known to have failed without asking the GPU."""
        self._spare = spare

    def __del__(self) -> None:  # whoever was told to wait for it waits for what was recorded then
        self._spare.append(self.raw)

    def done(self) -> bool:
        if not self._done:
            status = self._cupy.cuda.runtime.eventQuery(self.raw.ptr)
            if status not in (_SUCCESS, _NOT_READY) and self.early_error is None:
                self.early_error = TransferError(f"the GPU reported CUDA error {status}")
            self._done = status != _NOT_READY
        return self._done

    @property
    def error(self) -> BaseException | None:
        return self.early_error if self.done() else None

    def wait_done(self, timeout: float | None = None) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.done():
            if deadline is not None and time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, CudaEvent)
        assert earlier.done()
        assert self.done()
        if self.early_error is not None:
            return 0.0
        milliseconds: float = self._cupy.cuda.get_elapsed_time(earlier.raw, self.raw)
        return milliseconds / 1000


class _Backlog:
    """What was submitted to a stream and may still be queued.

    A queue of the driver that is full blocks whoever submits. Few open calls never fill it, and may keep the
    interpreter lock; more of them give it away.
    """

    def __init__(self) -> None:
        self.submitted = 0
        """Calls, to be counted by who makes them."""
        self.short_until = MOST_OPEN
        """While no more than this were submitted, few can be open, without a look at any event."""
        self.next_mark = LOOK_EVERY
        self._next_look = 0
        self._marks: deque[tuple[int, CudaEvent]] = deque()

    def is_short(self) -> bool:
        """Looks at events, but not at each call."""
        if self.submitted >= self._next_look:
            self._next_look = self.submitted + LOOK_EVERY
            while self._marks and self._marks[0][1].done():
                self.short_until = self._marks.popleft()[0] + MOST_OPEN
        return self.submitted <= self.short_until

    def mark(self, event: CudaEvent) -> None:
        """`event` ends with all calls so far."""
        self._marks.append((self.submitted, event))
        self.next_mark = self.submitted + LOOK_EVERY


class CudaStream(Stream):
    """A non-blocking CUDA stream. `submit` calls its function now, which enqueues on `handle` and returns."""

    def __init__(self, cupy: Any, name: str, handle: int | None = None) -> None:
        """`handle`: of a stream that another library owns; None makes a new one on the calling thread's GPU."""
        self.name = name
        self._cupy = cupy
        if handle is None:
            self._owned = cupy.cuda.Stream(non_blocking=True)
            handle = int(self._owned.ptr)
        self.handle = handle
        self._driver = driver()
        self._backlog: _Backlog | None = _Backlog()
        self._spare: dict[bool, list[Any]] = {False: [], True: []}
        """Events to be recorded again, by whether they are timed: making one costs more than recording it."""
        self._failure: BaseException | None = None
        self._closed = False

    def call(self, name: str, *arguments: object) -> None:
        """A call of the driver that enqueues on this stream. Raises `TransferError`."""
        functions, backlog = self._driver.giving_lock, self._backlog
        if backlog is not None:
            backlog.submitted += 1
            if backlog.submitted <= backlog.short_until or backlog.is_short():
                functions = self._driver.keeping_lock
        if code := functions[name](*arguments):
            raise TransferError(f"{name}: CUDA error {code}")

    def begin(self) -> None:
        self._failure = None

    def submit(self, fn: Callable[..., object], *args: object) -> None:
        if self._closed:
            raise CacheStateError(f"stream {self.name} is closed")
        if self._failure is not None:
            return
        try:
            fn(*args)
        except Exception as error:  # as on a stream thread: the unit fails, the stream goes on
            logger.exception("work on stream %s failed", self.name)
            self._failure = error

    def wait_event(self, event: Event, *, needs_data: bool = False, timeout: float | None = None) -> None:
        if isinstance(event, CudaEvent):
            self.call("cuStreamWaitEvent", self.handle, event.raw.ptr, 0)
            error = event.early_error
        else:  # CUDA knows nothing of a peer's use of a slot: its end is waited for here
            start = time.perf_counter()
            is_done = event.wait_done(timeout)
            self.waited_s += time.perf_counter() - start
            if not is_done:
                raise LayerSwapTimeoutError(f"a peer's use of a slot did not end within {timeout} s")
            error = event.error
        if needs_data and error is not None:
            self._miss_data(error)

    def _miss_data(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = TransferError(f"the copy it depends on failed: {describe(error)}")

    def record_event(self, *, timed: bool = False) -> CudaEvent:
        spare = self._spare[timed]
        raw = spare.pop() if spare else self._cupy.cuda.Event(disable_timing=not timed)
        event = CudaEvent(self._cupy, raw, self._failure, spare)
        self.call("cuEventRecord", raw.ptr, self.handle)
        backlog = self._backlog
        if backlog is not None and backlog.submitted >= backlog.next_mark:
            backlog.mark(event)
        return event

    def synchronize(self) -> None:
        self._cupy.cuda.runtime.streamSynchronize(self.handle)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.synchronize()


class CudaComputeStream(CudaStream):
    """Paddle's own stream. The host submits kernels to it itself, so a known failure raises instead of skipping; how
    many are queued is not known, so no call keeps the interpreter lock.
    """

    def __init__(self, cupy: Any, handle: int) -> None:
        super().__init__(cupy, "compute", handle)
        self._backlog = None

    def submit(self, fn: Callable[..., object], *args: object) -> None:
        fn(*args)

    def _miss_data(self, error: BaseException) -> None:
        raise TransferError(f"a copy failed: {describe(error)}") from error

    def close(self) -> None:
        """Belongs to Paddle."""


def use_device(device: int) -> None:
    """GPU `device` is the calling thread's from now on. Raises `ImportError` where CuPy is missing."""
    import cupy

    cupy.cuda.Device(device).use()


def stream_on(device: int, name: str) -> CudaStream:
    """A new stream of GPU `device`, which becomes the calling thread's. Raises as `use_device`."""
    use_device(device)
    import cupy

    return CudaStream(cupy, name)


class CudaRuntime(Runtime):
    """CuPy streams on GPU `device`. `compute_handle` is the raw stream of the forward pass; None asks Paddle for it.

    Raises `ImportError` where CuPy is missing.
    """

    on_gpu = True

    def __init__(self, device: int = 0, *, compute_handle: int | None = None, rates: Rates | None = None) -> None:
        import cupy

        self._cupy: Any = cupy
        self._device = device
        self._rates = trial.known() if rates is None else rates
        cupy.cuda.Device(device).use()
        if compute_handle is None:
            import paddle

            compute_handle = int(paddle.device.cuda.current_stream().cuda_stream)
        self.compute_stream = CudaComputeStream(cupy, compute_handle)

    def new_stream(self, name: str) -> CudaStream:
        return CudaStream(self._cupy, name)

    def allocate_host(self, nbytes: int, *, shared: bool = False) -> ops.HostBuffer:
        bus_id = self._cupy.cuda.runtime.deviceGetPCIBusId(self._device)
        buffer = allocate_near(nbytes, cpus_near(bus_id), shared=shared)
        # Registering keeps the huge pages of the mapping, which cudaHostAlloc would not give.
        buffer.keep_to_this_process()
        try:
            self._cupy.cuda.runtime.hostRegister(buffer.address, nbytes, PORTABLE | MAPPED)
        except self._cupy.cuda.runtime.CUDARuntimeError as error:
            buffer.free()
            raise ConfigError(f"{nbytes} bytes of host cache cannot be page-locked: {describe(error)}") from error
        return buffer

    def new_copies(self, device: Sequence[LayerRows], host: Sequence[LayerRows]) -> Copies:
        if chosen() == "paddle":
            return PaddleCopies(device, host)
        copies = CudaCopies(self._cupy, device, host, self._rates)
        for way, reason in copies.left.items():
            logger.warning("copies between GPU and host do without %s: %s", way, reason)
        return copies

    def free_host(self, buffer: ops.HostBuffer) -> None:
        self._cupy.cuda.runtime.hostUnregister(buffer.address)
        buffer.free()

    def require_memory(self, *, device_bytes: int, host_bytes: int) -> None:
        free, _total = self._cupy.cuda.runtime.memGetInfo()
        require("the device cache", device_bytes, free)
        require("the host cache (swap space)", host_bytes, free_host_memory())
