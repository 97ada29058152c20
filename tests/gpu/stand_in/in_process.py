"""A CUDA driver in Python, which stands in for `driver.py` below `cupy`: for tests in process, without a compiler.

Memory is host memory, a copy is a memmove. What it keeps is what a runtime relies on: streams are FIFOs that move when
they like, one that waits for an event stands still until then, an event has happened when its stream has passed it.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

COMPUTE = 1
"""Raw handle of the stream that plays Paddle's."""

OUT_OF_MEMORY, NOT_READY = 2, 600


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int, call: str) -> None:
        super().__init__(f"cudaError{status}: {call}")


class PythonDriver:
    """`log` holds what was asked for, in order."""

    CUDARuntimeError = CUDARuntimeError

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.log: list[tuple[object, ...]] = []
        self.queues: dict[int, deque[Callable[[], bool]]] = {0: deque(), COMPUTE: deque()}
        self.events: dict[int, float | None] = {}
        """When it happened; None for not yet."""
        self.timed: set[int] = set()
        self.registered: dict[int, int] = {}
        self.memory: dict[int, np.ndarray] = {}
        self.statuses: dict[str, int] = {}
        """What a call answers instead of what it does, by name."""
        self.now = 0.0
        self.copy_ns: Callable[[int, int], float] = lambda rows, width: 1e6
        self.progress_on_query = True
        self.library = types.SimpleNamespace(fake_run_all=self.run_all)
        self._handles = itertools.count(2)

    # ---- as `driver.py`

    def status_of(self, name: str, *arguments: Any) -> int:
        status = self.statuses.get(name)
        plain = [getattr(each, "value", getattr(each, "_obj", each)) for each in arguments]
        return getattr(self, name)(*plain) or 0 if status is None else status

    def call(self, name: str, *arguments: Any) -> None:
        if status := self.status_of(name, *arguments):
            raise CUDARuntimeError(status, name)

    def new_handle(self, name: str, *arguments: Any) -> int:
        made = ctypes.c_uint64()
        self.call(name, ctypes.byref(made), *arguments)
        return made.value

    def release(self, name: str, handle: int) -> None:
        """Nothing here is used up."""

    def launch(self, stream: int, body: Callable[..., object], *arguments: object) -> None:
        self.queues[stream].append(lambda: (body(*arguments), True)[1])

    # ---- what time does

    def tick(self) -> bool:
        """One entry of one random stream. False where no stream can go on."""
        handles = [handle for handle, queue in self.queues.items() if queue]
        self.random.shuffle(handles)
        for handle in handles:
            if self.queues[handle][0]():
                self.queues[handle].popleft()
                return True
        return False

    def run_all(self) -> None:
        while self.tick():
            pass
        assert not any(self.queues.values()), "streams wait for each other for ever"

    def owns(self, address: int, nbytes: int) -> bool:
        """Whether that is memory of the device."""
        return any(
            start <= address <= address + nbytes <= start + made.size - 256 for start, made in self.memory.items()
        )

    def _copy(self, stream: int, rows: list[tuple[int, int]], width: int) -> None:
        def body() -> None:
            self.now += self.copy_ns(len(rows), width)
            for to, of in rows:
                ctypes.memmove(to, of, width)

        self.launch(stream, body)

    # ---- the driver's functions

    def cuMemAlloc(self, made: Any, nbytes: int) -> None:
        memory = np.zeros(nbytes + 256, np.uint8)
        made.value = (memory.ctypes.data + 255) // 256 * 256
        self.memory[made.value] = memory

    def cuMemFree(self, address: int) -> None:
        del self.memory[address]

    def cuMemHostRegister(self, address: int, nbytes: int, flags: int) -> None:
        self.registered[address] = nbytes

    def cuMemHostUnregister(self, address: int) -> None:
        del self.registered[address]

    def cuMemcpyAsync(self, to: int, of: int, size: int, stream: int) -> None:
        self.log.append(("copy", stream, to, of, size))
        self._copy(stream, [(to, of)], size)

    def cuMemcpy2DAsync(self, copy: Any, stream: int) -> None:
        to, of = copy.target_host or copy.target_device, copy.source_host or copy.source_device
        self.log.append(("copy 2D", stream, to, copy.target_pitch, of, copy.source_pitch, copy.width, copy.height))
        rows = [(to + row * copy.target_pitch, of + row * copy.source_pitch) for row in range(copy.height)]
        self._copy(stream, rows, copy.width)

    def cuStreamCreate(self, made: Any, flags: int) -> None:
        made.value = next(self._handles)
        self.queues[made.value] = deque()
        self.log.append(("stream", made.value, "non-blocking" if flags else "blocking"))

    def cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> None:
        self.log.append(("wait", stream, event))
        self.queues[stream].append(lambda: self.events[event] is not None)

    def cuStreamSynchronize(self, stream: int) -> None:
        self.run_all()

    def cuEventCreate(self, made: Any, flags: int) -> None:
        made.value = next(self._handles)
        self.events[made.value] = 0.0
        if flags == 0:
            self.timed.add(made.value)

    def cuEventRecord(self, event: int, stream: int) -> None:
        self.log.append(("record", stream, event, "timed" if event in self.timed else "untimed"))
        self.events[event] = None
        self.launch(stream, lambda: self.events.__setitem__(event, self.now))

    def cuEventQuery(self, event: int) -> int:
        for _ in range(self.random.randrange(4) if self.progress_on_query else 0):
            self.tick()
        return NOT_READY if self.events[event] is None else 0

    def cuEventSynchronize(self, event: int) -> None:
        while self.events[event] is None:
            assert self.tick(), "streams wait for each other for ever"

    def cuEventElapsedTime(self, found: Any, start: int, end: int) -> None:
        assert {start, end} <= self.timed, "CUDA refuses events without timing"
        found.value = (self.events[end] - self.events[start]) / 1e6


@contextmanager
def cupy_in_process() -> Iterator[PythonDriver]:
    """`import cupy` finds the stand-in over a driver of its own."""
    place, gpu = str(Path(__file__).parent), PythonDriver()
    sys.path.insert(0, place)
    sys.modules["cupy.driver"] = gpu  # type: ignore[assignment]
    try:
        yield gpu
    finally:
        sys.path.remove(place)
        for name in [name for name in sys.modules if name.partition(".")[0] == "cupy"]:
            del sys.modules[name]
