"""Streams and events on an NVIDIA GPU through CuPy, which is imported at first use."""

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
"""cudaSuccess, cudaErrorNotReady."""
PORTABLE, MAPPED = 1, 2
"""cudaHostRegisterPortable, cudaHostRegisterMapped: for copies of every context, for kernels."""
MOST_OPEN = 256
"""Open calls of a stream (a batch counts by its copies) up to which a call keeps the interpreter lock. The driver's
queue holds 1,024."""
LOOK_EVERY = 32
"""Every so many calls an event is marked, and marked events are queried."""
_POLL_S = 0.0002
"""Pause between two queries of an event; CUDA has no timed wait."""


class CudaEvent(Event):
    """A `cupy.cuda.Event`, with a failure that was known at submission."""

    def __init__(self, cupy: Any, event: Any, failure: BaseException | None, spare: list[Any]) -> None:
        """`event`: None if it is done. `spare` takes `event` back for another recording."""
        self._cupy = cupy
        self.raw = event
        self.early_error = failure
        self._spare = spare
        self._done = event is None

    def __del__(self) -> None:  # enqueued waits refer to the recording, not to the event
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
    """Calls of a stream that may still be queued.

    A full queue of the driver blocks the submitting thread. A short backlog never fills it, so its calls may keep the
    interpreter lock.
    """

    def __init__(self) -> None:
        self.submitted = 0
        """Calls and copies of batches, counted by the caller."""
        self.short_until = MOST_OPEN
        """Up to this number of `submitted` the backlog is short, without a query."""
        self.next_mark = LOOK_EVERY
        self._next_look = 0
        self._marks: deque[tuple[int, CudaEvent]] = deque()

    def is_short(self) -> bool:
        """Query marked events, at every `LOOK_EVERY`th call at most."""
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
    """A non-blocking CUDA stream. `submit` calls its function at once, which enqueues on `handle`.

    The constructor and `begin` make its GPU the calling thread's. If the driver refuses to enqueue a wait or an event,
    the calling thread waits, which keeps the order.
    """

    def __init__(self, device: int, name: str, handle: int | None = None) -> None:
        """`handle`: a stream of another library; None makes a new one. Raises `ConfigError` without CuPy."""
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
        """Events for another recording, by `timed`: making an event costs more than recording it."""
        self._failure: BaseException | None = None
        self._closed = False

    def call(self, name: str, *arguments: object, copies: int = 1) -> None:
        """As `DriverStream.call`."""
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
        except Exception as error:  # the unit fails, the stream goes on
            logger.exception("work on stream %s failed", self.name)
            self._failure = error

    def wait_event(self, event: Event, *, needs_data: bool = False, timeout: float | None = None) -> None:
        if isinstance(event, CudaEvent) and self._enqueues_wait(event):
            error = event.early_error
        else:  # or a peer's use of a slot, which is no CUDA event
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
            logger.warning("stream %s blocks its thread for a wait that the driver refused: %s", self.name, error)
            return False
        return True

    def _miss_data(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = TransferError(f"an earlier copy failed: {describe(error)}")

    def record_event(self, *, timed: bool = False) -> CudaEvent:
        spare = self._spare[timed]
        try:
            raw = spare.pop() if spare else self._new_event(timed)
            self.call("cuEventRecord", raw.ptr, self.handle)
        except (TransferError, self._cupy.cuda.runtime.CUDARuntimeError) as error:
            logger.warning("stream %s blocks its thread for an event that the driver refused: %s", self.name, error)
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
        """Wait for all submitted work."""
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
    """Paddle's own stream. FastDeploy submits kernels itself, so a known failure raises instead of skipping. The length
    of the queue is unknown, so calls release the interpreter lock.
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
    """Make GPU `device` the calling thread's. Raises `ConfigError` without CuPy."""
    load_cupy().cuda.Device(device).use()


class CudaRuntime(Runtime):
    """CuPy streams on GPU `device`, which every method makes the calling thread's."""

    on_gpu = True

    def __init__(self, device: int = 0, *, compute_handle: int | None = None, rates: Rates | None = None) -> None:
        """`compute_handle`: raw stream of the forward pass (default: Paddle's). Raises `ConfigError` without CuPy."""
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
        # Registering keeps the mapping's huge pages, unlike cudaHostAlloc.
        buffer.keep_to_this_process()
        try:
            self._cupy.cuda.runtime.hostRegister(buffer.address, nbytes, PORTABLE | MAPPED)
        except self._cupy.cuda.runtime.CUDARuntimeError as error:
            buffer.free()
            raise ConfigError(
                f"the GPU refused to page-lock {nbytes} bytes of host cache ({describe(error)}): lower --swap-space"
            ) from error
        return buffer

    def new_copies(self, device: Sequence[LayerRows], host: Sequence[LayerRows]) -> Copies:
        if chosen() == "paddle":
            return PaddleCopies(device, host)
        use_device(self._device)
        copies = CudaCopies(self._cupy, device, host, self._rates)
        for path, reason in copies.left.items():
            logger.warning("copies between GPU and host do not use %s: %s", path, reason)
        return copies

    def copy_paths(self) -> tuple[CopyPath, ...]:
        return both_ways("paddle") if chosen() == "paddle" else trial.known().copy_paths()

    def free_host(self, buffer: ops.HostBuffer) -> None:
        use_device(self._device)
        self._cupy.cuda.runtime.hostUnregister(buffer.address)
        buffer.free()

    def require_memory(self, *, device_bytes: int, host_bytes: int) -> None:
        use_device(self._device)
        free, _total = self._cupy.cuda.runtime.memGetInfo()
        require("the device cache", device_bytes, free)
        require("the host cache (swap space)", host_bytes, free_host_memory())
