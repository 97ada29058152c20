"""A stand-in for the part of CuPy that `CudaRuntime` uses, because the machines that run these tests have no GPU.

It is not a simulator of CUDA: memory is host memory, and a copy is a memmove. What it does keep is what the runtime
relies on: streams are FIFOs that make progress whenever they like, an event is done when its stream has passed it, a
stream that waits for an event stands still until then. `log` holds every call in order.
"""

from __future__ import annotations

import ctypes
import random
import types
from collections import deque
from collections.abc import Callable

import numpy as np

from tests.worker.worker_fakes import NumpyBackend

COMPUTE = 1000
"""Raw handle of the stream that plays Paddle's."""


class FakeGpu:
    """Streams by handle, events by handle, and the log of calls."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.log: list[tuple[object, ...]] = []
        self.queues: dict[int, deque[Callable[[], bool]]] = {COMPUTE: deque()}
        self.events_done: dict[int, bool] = {}
        self.registered: dict[int, int] = {}
        self.free_bytes = 1 << 30
        self.event_status = 0
        self.fail_copies_from: int | None = None
        self.progress_on_query = True
        self._next = 1

    def handle(self) -> int:
        self._next += 1
        return self._next

    def launch(self, stream: int, fn: Callable[..., object], *args: object) -> None:
        """Put a kernel on a stream."""

        def run() -> bool:
            fn(*args)
            return True

        self.queues[stream].append(run)

    def tick(self) -> bool:
        """Let one random stream that can, run its next entry. False when none can."""
        streams = [handle for handle, queue in self.queues.items() if queue]
        self.random.shuffle(streams)
        for handle in streams:
            if self.queues[handle][0]():
                self.queues[handle].popleft()
                return True
        return False

    def run_all(self) -> None:
        while self.tick():
            pass
        assert not any(self.queues.values()), "streams wait for each other for ever"

    def copy(self, stream: int, rows: list[tuple[int, int]], width: int, *entry: object) -> None:
        if self.fail_copies_from is not None and stream == self.fail_copies_from:
            raise CUDARuntimeError("cudaErrorInvalidValue: invalid argument")
        self.log.append(entry)
        self.launch(stream, lambda: [ctypes.memmove(to, of, width) for to, of in rows])


class CUDARuntimeError(RuntimeError):
    pass


def make_cupy(gpu: FakeGpu) -> dict[str, types.ModuleType]:
    """Modules to put into `sys.modules`."""
    cupy, cuda, runtime = (types.ModuleType(name) for name in ("cupy", "cupy.cuda", "cupy.cuda.runtime"))

    class Stream:
        def __init__(self, non_blocking: bool = False, ptr: int | None = None) -> None:
            self.ptr = gpu.handle() if ptr is None else ptr
            gpu.queues.setdefault(self.ptr, deque())
            gpu.log.append(("stream", self.ptr, "non-blocking" if non_blocking else "blocking"))

        def wait_event(self, event: Event) -> None:
            wait_event(self.ptr, event.ptr)

        def synchronize(self) -> None:
            gpu.run_all()

    class Event:
        def __init__(self, block: bool = False, disable_timing: bool = False) -> None:
            self.ptr = gpu.handle()
            self.timed = not disable_timing

        def record(self, stream: Stream) -> None:
            gpu.log.append(("record", stream.ptr, self.ptr, "timed" if self.timed else "untimed"))
            gpu.events_done[self.ptr] = False
            gpu.launch(stream.ptr, gpu.events_done.__setitem__, self.ptr, True)

    class Device:
        def __init__(self, device: int) -> None:
            self.id = device

        def use(self) -> None:
            gpu.log.append(("device", self.id))

    def elapsed(start: Event, end: Event) -> float:
        assert start.timed, "CUDA refuses events without timing"
        assert end.timed
        return 2.0

    def query(event: int) -> int:
        if gpu.event_status:
            return gpu.event_status
        for _ in range(gpu.random.randrange(4) if gpu.progress_on_query else 0):
            gpu.tick()
        return 0 if gpu.events_done[event] else 600

    def memcpy(to: int, of: int, size: int, kind: int, stream: int) -> None:
        gpu.copy(stream, [(to, of)], size, "memcpyAsync", to, of, size, kind, stream)

    def memcpy_2d(to: int, dpitch: int, of: int, spitch: int, width: int, height: int, kind: int, stream: int) -> None:
        rows = [(to + row * dpitch, of + row * spitch) for row in range(height)]
        gpu.copy(stream, rows, width, "memcpy2DAsync", to, dpitch, of, spitch, width, height, kind, stream)

    def register(address: int, nbytes: int, flags: int) -> None:
        if nbytes > gpu.free_bytes:
            raise CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")
        gpu.registered[address] = nbytes

    def wait_event(stream: int, event: int) -> None:
        gpu.log.append(("wait", stream, event))
        gpu.queues[stream].append(lambda: gpu.events_done[event])

    contents = {
        "streamWaitEvent": wait_event,
        "streamSynchronize": lambda stream: gpu.run_all(),
        "memcpyHostToDevice": 1,
        "memcpyDeviceToHost": 2,
        "memcpyAsync": memcpy,
        "memcpy2DAsync": memcpy_2d,
        "eventQuery": query,
        "hostRegister": register,
        "hostUnregister": gpu.registered.__delitem__,
        "deviceGetPCIBusId": lambda device: f"0000:A{device}:00.0",
        "memGetInfo": lambda: (gpu.free_bytes, 2 << 30),
        "CUDARuntimeError": CUDARuntimeError,
    }
    vars(runtime).update(contents)
    vars(cuda).update(
        runtime=runtime,
        Stream=Stream,
        Event=Event,
        Device=Device,
        get_elapsed_time=elapsed,
    )
    vars(cupy).update(cuda=cuda)
    return {"cupy": cupy, "cupy.cuda": cuda, "cupy.cuda.runtime": runtime}


class FakeGpuTensor:
    """What `tensor_rows` asks of a paddle tensor in GPU memory."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.shape = list(array.shape)
        self.place = self

    def is_gpu_place(self) -> bool:
        return True

    def is_cpu_place(self) -> bool:
        return False

    def is_contiguous(self) -> bool:
        return bool(self.array.flags.c_contiguous)

    def element_size(self) -> int:
        return self.array.itemsize

    def data_ptr(self) -> int:
        return self.array.ctypes.data


class FakeGpuBackend(NumpyBackend):
    """Cache tensors that say they are in GPU memory."""

    def create_kv_cache(self, num_blocks: int, *, rank: int = 0, device: int = 0) -> dict[str, FakeGpuTensor]:
        arrays = super().create_kv_cache(num_blocks, rank=rank, device=device)
        return {name: FakeGpuTensor(array) for name, array in arrays.items()}
