"""A device whose streams are run by the world, operation by operation, in any order that their waits allow.

As on a GPU: submitting never waits, a failure that is known when work is submitted fails its unit, and who waits for an
event waits on the stream. Only `synchronize` and `wait_done` run the device until they are met.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fastdeploy_kvcache_v1.errors import TransferError
from fastdeploy_kvcache_v1.worker.ops import HostBuffer, LayerRows
from fastdeploy_kvcache_v1.worker.ops.copies import CpuCopies
from fastdeploy_kvcache_v1.worker.runtime import Event, Runtime, Stream

from .clock import Clock
from .memory import GARBAGE, WrongError


class VirtualEvent(Event):
    def __init__(self, device: VirtualDevice, failure: BaseException | None) -> None:
        self._device, self.failure = device, failure
        self.at: float | None = None

    def done(self) -> bool:
        return self.at is not None

    @property
    def error(self) -> BaseException | None:
        return self.failure if self.done() else None

    def wait_done(self, timeout: float | None = None) -> bool:
        self._device.run_until(self.done)
        return True

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, VirtualEvent)
        assert self.at is not None
        assert earlier.at is not None
        return self.at - earlier.at


class VirtualStream(Stream):
    def __init__(self, device: VirtualDevice, name: str, *, computes: bool = False) -> None:
        self.device, self.name, self._computes = device, name, computes
        self.waiting: deque[Callable[[], bool]] = deque()
        """Each returns False as long as it has to wait."""
        self._failure: BaseException | None = None

    def begin(self) -> None:
        self._failure = None

    def submit(self, fn: Callable[..., object], *args: object) -> None:
        if self._failure is None and not self._computes and self.device.copy_fails(self.name):
            self._failure = TransferError("injected")
        if self._failure is None:
            self.waiting.append(lambda: fn(*args) or True)
        elif isinstance(getattr(fn, "__self__", None), VirtualCopies):
            self.waiting.append(lambda: VirtualCopies.spoil(fn.__self__, *args) or True)

    def wait_event(self, event: Event, *, needs_data: bool = False, timeout: float | None = None) -> None:
        assert isinstance(event, VirtualEvent)
        if needs_data and event.failure is not None:
            failure = TransferError(f"the copy it depends on failed: {event.failure}")
            if self._computes:
                raise failure
            self._failure = self._failure or failure
        self.waiting.append(event.done)

    def record_event(self, *, timed: bool = False) -> VirtualEvent:
        event = VirtualEvent(self.device, self._failure)

        def reach() -> bool:
            event.at = self.device.clock()
            return True

        self.waiting.append(reach)
        return event

    def run(self) -> bool:
        """One operation, if it need not wait."""
        if not self.waiting or not self.waiting[0]():
            return False
        self.waiting.popleft()
        return True

    def synchronize(self) -> None:
        self.device.run_until(lambda: not self.waiting)

    def close(self) -> None:
        self.synchronize()


class VirtualCopies(CpuCopies):
    def spoil(self, stream: VirtualStream, *of: Any) -> None:
        """This copy has failed: what it was to fill is garbage."""
        *layer, runs, to_device = of
        sides, first = self._pairs[to_device], layer[0] * self._num_roles if layer else 0
        for rows, _ in sides[first : first + self._num_roles] if layer else sides:
            for _, at, blocks in runs:
                rows.array[at : at + blocks] = 0xFF  # the bytes of GARBAGE


class VirtualDevice(Runtime):
    def __init__(self, clock: Clock, copy_fails: Callable[[str], bool] = lambda stream: False) -> None:
        self.clock, self.copy_fails = clock, copy_fails
        self.streams = [VirtualStream(self, "compute", computes=True)]

    on_gpu = False

    @property
    def compute_stream(self) -> VirtualStream:
        return self.streams[0]

    def new_stream(self, name: str) -> VirtualStream:
        self.streams.append(VirtualStream(self, name))
        return self.streams[-1]

    def new_copies(self, device: Sequence[LayerRows], host: Sequence[LayerRows]) -> VirtualCopies:
        return VirtualCopies(device, host)

    def allocate_host(self, nbytes: int, *, shared: bool = False) -> HostBuffer:
        return HostBuffer(np.full(nbytes // 8, GARBAGE, np.int64))

    def free_host(self, buffer: HostBuffer) -> None:
        buffer.free()

    def require_memory(self, *, device_bytes: int, host_bytes: int) -> None:
        pass

    def close(self) -> None:
        pass

    # ---- the world's end

    @property
    def is_idle(self) -> bool:
        return not any(stream.waiting for stream in self.streams)

    def run_some(self, rng: random.Random, most: int) -> None:
        """Up to `most` operations of streams that can go on."""
        for _ in range(rng.randrange(1, most + 1)):
            stream = rng.choice(self.streams)
            if not stream.run() and not any(each.run() for each in self.streams):
                return

    def run_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            ran = [stream.run() for stream in self.streams]
            if not any(ran):
                raise WrongError("streams wait for each other for ever")


class AtOnce(VirtualDevice):
    """Nothing is late: what is submitted is done."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.compute_stream.waiting = _Done()

    def new_stream(self, name: str) -> VirtualStream:
        stream = super().new_stream(name)
        stream.waiting = _Done()
        return stream


class _Done(deque[Callable[[], bool]]):
    def append(self, operation: Callable[[], bool]) -> None:
        assert operation()
