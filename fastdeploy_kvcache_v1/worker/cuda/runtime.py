"""Streams and events on an NVIDIA GPU through CuPy, which is imported only when one is made."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ...contract.messages import CopyPath
from ...errors import CacheStateError, ConfigError, LayerSwapTimeoutError, TransferError
from .. import ops
from ..ops.copies import Copies, both_ways, chosen
from ..ops.paddle_ops import PaddleCopies
from ..ops.rows import LayerRows
from ..runtime.base import Event, Runtime, Stream, describe, free_host_memory, require
from ..runtime.placement import allocate_near, cpus_near
from . import trial
from .copies import CudaCopies
from .driver import driver, load_cupy
from .rates import Rates

logger = logging.getLogger(__name__)

_SUCCESS, _NOT_READY = 0, 600
"""cudaSuccess and cudaErrorNotReady, the two healthy answers of cudaEventQuery."""

PORTABLE, MAPPED = 1, 2
"""cudaHostRegisterPortable and cudaHostRegisterMapped: every context may copy from it, kernels may reach it."""

MOST_OPEN = 256
"""Calls of a stream, and copies of its batches, that may be queued while others keep the interpreter lock; a queue of
the driver holds 1,024.
"""

LOOK_EVERY = 32
"""Calls of a stream from one event that is asked for to the next, and from one question to the next."""

_POLL_S = 0.0002
"""Sleep between two looks at an event; CUDA has no timed wait."""


class CudaEvent(Event):
    """Wraps a `cupy.cuda.Event`; also carries a failure known at submission, which the GPU never sees."""

    def __init__(self, cupy: Any, event: Any, failure: BaseException | None, spare: list[Any]) -> None:
        """`spare`: where `event` goes when nobody asks for this one any more, to be recorded anew. Done without one."""
        self._cupy = cupy
        self.raw = event
        self.early_error = failure
        """What is known to have failed without asking the GPU."""
        self._spare = spare
        self._done = event is None

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
        if self.early_error is not None or earlier.raw is None or self.raw is None:
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
        """Calls and copies of batches, to be counted by who makes them."""
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
    """A non-blocking CUDA stream. `submit` calls its function now, which enqueues on `handle` and returns.

    Its GPU becomes the calling thread's when it is made, and with each unit of work. A wait or an event that the driver
    refuses to enqueue is waited for by the calling thread, so that the order is kept.
    """

    def __init__(self, device: int, name: str, handle: int | None = None) -> None:
        """`handle`: of a stream that another library owns; None makes a new one. Raises `ConfigError` without CuPy."""
        self.name = name
        self._cupy = load_cupy()
        self._device = self._cupy.cuda.Device(device)
        self._device.use()
        if handle is None:
            self._owned = self._cupy.cuda.Stream(non_blocking=True)
            handle = int(self._owned.ptr)
        self.handle = handle
        self._driver = driver()
        self._backlog: _Backlog | None = _Backlog()
        self._spare: dict[bool, list[Any]] = {False: [], True: []}
        """Events to be recorded again, by whether they are timed: making one costs more than recording it."""
        self._failure: BaseException | None = None
        self._closed = False

    def call(self, name: str, *arguments: object, copies: int = 1) -> None:
        """A call of the driver that enqueues so many copies on this stream. Raises `TransferError`."""
        functions, backlog = self._driver.giving_lock, self._backlog
        if backlog is not None:
            backlog.submitted += copies
            if backlog.submitted <= backlog.short_until or backlog.is_short():
                functions = self._driver.keeping_lock
        if code := functions[name](*arguments):
            raise TransferError(f"{name}: CUDA error {code}")

    def begin(self) -> None:
        self._device.use()
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
        if isinstance(event, CudaEvent) and self._enqueues_wait(event):
            error = event.early_error
        else:  # also a peer's use of a slot, of which CUDA knows nothing
            start = time.perf_counter()
            is_done = event.wait_done(timeout)
            self.waited_s += time.perf_counter() - start
            if not is_done:
                user = "the GPU's" if isinstance(event, CudaEvent) else "a peer's"
                raise LayerSwapTimeoutError(f"{user} use of a slot did not end within {timeout} s")
            error = event.error
        if needs_data and error is not None:
            self._miss_data(error)

    def _enqueues_wait(self, event: CudaEvent) -> bool:
        if event.raw is None:
            return True
        try:
            self.call("cuStreamWaitEvent", self.handle, event.raw.ptr, 0)
        except TransferError as error:
            logger.warning("stream %s waits in its thread: %s", self.name, error)
            return False
        return True

    def _miss_data(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = TransferError(f"the copy it depends on failed: {describe(error)}")

    def record_event(self, *, timed: bool = False) -> CudaEvent:
        spare = self._spare[timed]
        try:
            raw = spare.pop() if spare else self._new_event(timed)
            self.call("cuEventRecord", raw.ptr, self.handle)
        except (TransferError, self._cupy.cuda.runtime.CUDARuntimeError) as error:
            logger.warning("stream %s is waited for by its thread: %s", self.name, error)
            return self._event_of_the_end()
        event = CudaEvent(self._cupy, raw, self._failure, spare)
        backlog = self._backlog
        if backlog is not None and backlog.submitted >= backlog.next_mark:
            backlog.mark(event)
        return event

    def _new_event(self, timed: bool) -> Any:
        self._device.use()
        return self._cupy.cuda.Event(disable_timing=not timed)

    def _event_of_the_end(self) -> CudaEvent:
        """Everything submitted so far has ended when this returns."""
        try:
            self.synchronize()
        except self._cupy.cuda.runtime.CUDARuntimeError as error:  # nothing runs on this GPU any more
            self._failure = self._failure or error
        return CudaEvent(self._cupy, None, self._failure, [])

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

    def __init__(self, device: int, handle: int) -> None:
        super().__init__(device, "compute", handle)
        self._backlog = None

    def submit(self, fn: Callable[..., object], *args: object) -> None:
        fn(*args)

    def _miss_data(self, error: BaseException) -> None:
        raise TransferError(f"a copy failed: {describe(error)}") from error

    def close(self) -> None:
        """Belongs to Paddle."""


def use_device(device: int) -> None:
    """GPU `device` is the calling thread's from now on. Raises `ConfigError` where CuPy is missing."""
    load_cupy().cuda.Device(device).use()


class CudaRuntime(Runtime):
    """CuPy streams on GPU `device`, which every method makes the calling thread's.

    `compute_handle` is the raw stream of the forward pass; None asks Paddle for it.

    Raises `ConfigError` where CuPy is missing.
    """

    on_gpu = True

    def __init__(self, device: int = 0, *, compute_handle: int | None = None, rates: Rates | None = None) -> None:
        self._cupy, self._device = load_cupy(), device
        self._rates = trial.known() if rates is None else rates
        use_device(device)
        if compute_handle is None:
            import paddle

            compute_handle = int(paddle.device.cuda.current_stream().cuda_stream)
        self.compute_stream = CudaComputeStream(device, compute_handle)

    def new_stream(self, name: str) -> CudaStream:
        return CudaStream(self._device, name)

    def allocate_host(self, nbytes: int, *, shared: bool = False) -> ops.HostBuffer:
        use_device(self._device)
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
        use_device(self._device)
        copies = CudaCopies(self._cupy, device, host, self._rates)
        for way, reason in copies.left.items():
            logger.warning("copies between GPU and host do without %s: %s", way, reason)
        return copies

    def copy_paths(self) -> tuple[CopyPath, ...]:
        return both_ways("paddle") if chosen() == "paddle" else trial.known().paths()

    def free_host(self, buffer: ops.HostBuffer) -> None:
        use_device(self._device)
        self._cupy.cuda.runtime.hostUnregister(buffer.address)
        buffer.free()

    def require_memory(self, *, device_bytes: int, host_bytes: int) -> None:
        use_device(self._device)
        free, _total = self._cupy.cuda.runtime.memGetInfo()
        require("the device cache", device_bytes, free)
        require("the host cache (swap space)", host_bytes, free_host_memory())
