"""The contract of a runtime: streams, events and host memory of one device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from ...config import GIB
from ...contract.messages import CopyPath
from ...errors import ConfigError, LayerSwapTimeoutError, TransferError
from ..ops import HostBuffer, LayerRows
from ..ops.copies import Copies
from . import memory_limits


class Event(ABC):
    """A point in a stream. Thread-safe; once done it stays done.

    It *covers* the work since the stream's last `begin()`, and has failed if any of that work failed.
    """

    @abstractmethod
    def done(self) -> bool:
        """True once the stream has passed this point, also after a failure. Never blocks."""

    @property
    @abstractmethod
    def error(self) -> BaseException | None:
        """Failure of the covered work; None if it succeeded or is not done."""

    @abstractmethod
    def wait_done(self, timeout: float | None = None) -> bool:
        """Block the calling thread until `done()`; False after `timeout` seconds."""

    @abstractmethod
    def seconds_since(self, earlier: Event) -> float:
        """Stream time between two done events of one stream, both recorded with `timed=True`."""

    def wait(self, timeout: float | None = None) -> None:
        """Block the calling thread. Raises `LayerSwapTimeoutError`, or `TransferError` if the work failed."""
        if not self.wait_done(timeout):
            raise LayerSwapTimeoutError(f"a copy was not done within {timeout} s")
        self.raise_if_failed()

    def raise_if_failed(self) -> None:
        if self.error is not None:
            raise TransferError(f"a copy failed: {describe(self.error)}") from self.error


class Stream(ABC):
    """A FIFO of work. Submitted from one thread at a time.

    Asynchronous streams (copy streams, and compute on a GPU) neither block nor raise for their work. A failure skips
    the rest of its unit and shows in the events that cover it. The inline compute stream of a CPU *is* the calling
    thread: it blocks in `wait_event` and raises.
    """

    name: str
    waited_s = 0.0
    """Seconds that calling threads have waited in `wait_event`."""

    @abstractmethod
    def begin(self) -> None:
        """Start a new unit of work, independent of earlier failures."""

    @abstractmethod
    def submit(self, fn: Callable[..., object], *args: object) -> None:
        """Run `fn(*args)` after all submitted work; skip it if its unit has failed."""

    @abstractmethod
    def wait_event(self, event: Event, *, needs_data: bool = False, timeout: float | None = None) -> None:
        """Make later work wait for `event`. With `needs_data` this unit fails if the event's work failed.

        Asynchronous streams always wait to the end, even in a failed unit: later units rely on the order. Inline
        streams raise `LayerSwapTimeoutError` after `timeout` seconds, and `TransferError` with `needs_data`. So do
        streams of a GPU for a peer's use of a slot, which is no event of the GPU: the calling thread waits.
        """

    @abstractmethod
    def record_event(self, *, timed: bool = False) -> Event:
        """Return an event that covers this unit up to here. `seconds_since` needs `timed` events."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block until all submitted work has run. Does not raise: events have the failures."""

    @abstractmethod
    def close(self) -> None:
        """Finish submitted work and end; a later `submit` raises `CacheStateError`. Idempotent."""


class Runtime(ABC):
    """Maker of streams and host memory for one device. Used by one thread at a time."""

    on_gpu: bool
    """Is the device tier in GPU memory?"""
    compute_stream: Stream
    """The stream of the forward pass."""

    @abstractmethod
    def new_stream(self, name: str) -> Stream:
        """Make an asynchronous stream, which the caller closes."""

    @abstractmethod
    def new_copies(self, device: Sequence[LayerRows], host: Sequence[LayerRows]) -> Copies:
        """Make the copies between these tiers. Raises `CacheStateError` if their layers differ."""

    @abstractmethod
    def copy_paths(self) -> tuple[CopyPath, ...]:
        """List the copy paths in use, and the others with a reason."""

    @abstractmethod
    def allocate_host(self, nbytes: int, *, shared: bool = False) -> HostBuffer:
        """Allocate zeroed host memory, with all pages, near the device, page-locked for a GPU. `shared`: other
        processes can map it.
        """

    @abstractmethod
    def free_host(self, buffer: HostBuffer) -> None:
        """Free memory of `allocate_host`. Raises `CacheStateError` the second time."""

    @abstractmethod
    def require_memory(self, *, device_bytes: int, host_bytes: int) -> None:
        """Raises `ConfigError` if the free memory is too small for the two tiers."""


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def free_host_memory() -> int:
    """Bytes that this process can still get: the machine's free memory, or less by a control group's limit."""
    import psutil  # here, so that only a worker that allocates needs it

    free: int = psutil.virtual_memory().available
    left = memory_limits.room()
    return free if left is None else min(free, left)


def require(what: str, needed: int, free: int) -> None:
    """Raises `ConfigError` if `what` needs more bytes than are free."""
    if needed > free:
        raise ConfigError(f"{what} needs {needed / GIB:.2f} GiB, but {free / GIB:.2f} GiB are free: lower its size")
