"""A device whose streams the world runs, operation by operation, in any order that their waits allow.

As on a GPU, submitting never waits, and a wait for an event is a wait of the stream. A copy that cannot be submitted
fails at once. Only `synchronize` and `wait_done` run the device until their condition holds.
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
from fastdeploy_kvcache_v1.worker.runtime import CpuRuntime, Event, Stream
from fastdeploy_kvcache_v1.worker.runtime.cpu import CpuEvent

from .memory import GARBAGE, WrongError


class Clock:
    """Seconds that only the world advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class VirtualEvent(CpuEvent):
    def __init__(self, device: VirtualDevice, failure: BaseException | None) -> None:
        super().__init__()
        self._device, self.failure = device, failure

    def reach(self) -> bool:
        self.finish(self.failure)
        self._time = self._device.clock()
        return True

    def wait_done(self, timeout: float | None = None) -> bool:
        self._device.run_until(self.done)
        return True


class VirtualStream(Stream):
    def __init__(self, device: VirtualDevice, name: str, *, computes: bool = False) -> None:
        self.device, self.name, self._computes = device, name, computes
        self.waiting: deque[Callable[[], bool]] = deque()
        """Operations. Each returns False while it has to wait."""
        self._failure: BaseException | None = None

    def begin(self) -> None:
        self._failure = None

    def submit(self, fn: Callable[..., object], *args: object) -> None:
        if self._failure is None and not self._computes and self.device.copy_fails(self.name):
            self._failure = TransferError("injected")
        if self._failure is None:
            self._post(lambda: fn(*args) or True)
        elif isinstance(getattr(fn, "__self__", None), VirtualCopies):
            self._post(lambda: VirtualCopies.spoil(fn.__self__, *args) or True)

    def _post(self, operation: Callable[[], bool]) -> None:
        if not self.device.at_once:
            self.waiting.append(operation)
        elif not operation():
            raise WrongError("it waits where nothing is late")

    def wait_event(self, event: Event, *, needs_data: bool = False, timeout: float | None = None) -> None:
        assert isinstance(event, VirtualEvent)
        if needs_data and event.failure is not None:
            failure = TransferError(f"an earlier copy failed: {event.failure}")
            if self._computes:
                raise failure
            self._failure = self._failure or failure
        self._post(event.done)

    def record_event(self, *, timed: bool = False) -> VirtualEvent:
        event = VirtualEvent(self.device, self._failure)
        self._post(event.reach)
        return event

    def run(self) -> bool:
        """Run one operation. Return False if it has to wait."""
        if not self.waiting or not self.waiting[0]():
            return False
        self.waiting.popleft()
        return True

    def synchronize(self) -> None:
        self.device.run_until(lambda: not self.waiting)

    close = synchronize


class VirtualCopies(CpuCopies):
    def spoil(self, stream: VirtualStream, *of: Any) -> None:
        """Fill the target of a failed copy with garbage."""
        *layer, runs, to_device = of
        sides, first = self._pairs[to_device], layer[0] * self._num_roles if layer else 0
        for rows, _ in sides[first : first + self._num_roles] if layer else sides:
            for _, at, blocks in runs:
                rows.array[at : at + blocks] = 0xFF  # the bytes of GARBAGE


class VirtualDevice(CpuRuntime):
    def __init__(
        self, clock: Clock, copy_fails: Callable[[str], bool] = lambda stream: False, *, at_once: bool = False
    ) -> None:
        """`at_once`: run each operation when it is submitted."""
        super().__init__()
        self.clock, self.copy_fails, self.at_once = clock, copy_fails, at_once
        self.streams = [VirtualStream(self, "compute", computes=True)]
        self.compute_stream = self.streams[0]

    def new_stream(self, name: str) -> VirtualStream:
        self.streams.append(VirtualStream(self, name))
        return self.streams[-1]

    def new_copies(self, device: Sequence[LayerRows], host: Sequence[LayerRows]) -> VirtualCopies:
        return VirtualCopies(device, host)

    def allocate_host(self, nbytes: int, *, shared: bool = False) -> HostBuffer:
        return HostBuffer(np.full(nbytes // 8, GARBAGE, np.int64))

    def require_memory(self, *, device_bytes: int, host_bytes: int) -> None:
        pass

    # ---- called by the world

    @property
    def is_idle(self) -> bool:
        return not any(stream.waiting for stream in self.streams)

    def run_some(self, rng: random.Random, most: int) -> None:
        """Run up to `most` operations of streams that need not wait."""
        for _ in range(rng.randrange(1, most + 1)):
            stream = rng.choice(self.streams)
            if not stream.run() and not any(each.run() for each in self.streams):
                return

    def run_dry(self) -> None:
        self.run_until(lambda: self.is_idle)

    def run_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            ran = [stream.run() for stream in self.streams]
            if not any(ran):
                raise WrongError("streams wait for each other for ever")
