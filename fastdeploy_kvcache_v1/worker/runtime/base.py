"""What the worker half needs of a device: streams, events, host memory. The contract of every runtime stands here."""

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
    """A point in a stream. Thread-safe; never un-happens.

    It *covers* the work submitted since the stream's last `begin()`, and failed if any of that work failed.
    """

    @abstractmethod
    def done(self) -> bool:
        """True once the stream is past this point, whether the work went well or not. Never blocks."""

    @property
    @abstractmethod
    def error(self) -> BaseException | None:
        """Why the covered work failed; None when it went well or is not done."""

    @abstractmethod
    def wait_done(self, timeout: float | None = None) -> bool:
        """Block the calling thread until `done()`; False when `timeout` seconds were not enough."""

    @abstractmethod
    def seconds_since(self, earlier: Event) -> float:
        """Stream time between two events of one stream, both done and recorded with `timed=True`."""

    def wait(self, timeout: float | None = None) -> None:
        """Block the calling thread. Raises `LayerSwapTimeoutError`, or `TransferError` when the work failed."""
        if not self.wait_done(timeout):
            raise LayerSwapTimeoutError(f"a copy was not done within {timeout} s")
        self.raise_if_failed()

    def raise_if_failed(self) -> None:
        if self.error is not None:
            raise TransferError(f"a copy failed: {describe(self.error)}") from self.error


class Stream(ABC):
    """A FIFO of work. Submitted from one thread at a time.

    Asynchronous streams (copy streams, and compute on a GPU) never block or raise for the work's sake: a failure
    skips the rest of its unit and shows in the events that cover it. The inline compute stream of a CPU *is* the
    calling thread: it blocks in `wait_event` and raises.
    """

    name: str
    waited_s = 0.0
    """Seconds that calling threads stood still in `wait_event` so far."""

    @abstractmethod
    def begin(self) -> None:
        """Start a new unit of work: failures of earlier units do not concern it."""

    @abstractmethod
    def submit(self, fn: Callable[..., object], *args: object) -> None:
        """Run `fn(*args)` after everything submitted so far; skipped when its unit has failed already."""

    @abstractmethod
    def wait_event(self, event: Event, *, needs_data: bool = False, timeout: float | None = None) -> None:
        """Later work waits for `event`. With `needs_data` this unit fails if the event's work failed.

        Asynchronous streams always wait to the end, even in a failed unit: what follows relies on the order. Inline
        streams raise `LayerSwapTimeoutError` after `timeout` seconds, and `TransferError` with `needs_data`. Those of
        a GPU can wait for its events only: for a peer's use of a slot the calling thread waits, and raises so, too.
        """

    @abstractmethod
    def record_event(self, *, timed: bool = False) -> Event:
        """An event that covers this unit up to here. `timed` ones can tell `seconds_since`."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block until everything submitted so far has run. Does not raise: failures are on the events."""

    @abstractmethod
    def close(self) -> None:
        """Finish what was submitted, then end. Submitting afterwards raises `CacheStateError`. Idempotent."""


class Runtime(ABC):
    """Maker of streams and host memory on one device. Used by one thread at a time."""

    on_gpu: bool
    """Where the device tier lives."""
    compute_stream: Stream
    """The stream of the forward pass."""

    @abstractmethod
    def new_stream(self, name: str) -> Stream:
        """An asynchronous stream, independent of all others. Who asked for it closes it."""

    @abstractmethod
    def new_copies(self, device: Sequence[LayerRows], host: Sequence[LayerRows]) -> Copies:
        """The copies between these tiers, by layer. Raises `CacheStateError` for tiers that do not fit each other."""

    @abstractmethod
    def copy_paths(self) -> tuple[CopyPath, ...]:
        """The ways in which blocks are copied now, and those that were left."""

    @abstractmethod
    def allocate_host(self, nbytes: int, *, shared: bool = False) -> HostBuffer:
        """Zeroed host memory whose pages are there, near the device, page-locked where there is a GPU. `shared`: other
        processes can map it. `free_host` gives it back.
        """

    @abstractmethod
    def free_host(self, buffer: HostBuffer) -> None:
        """Raises `CacheStateError` the second time."""

    @abstractmethod
    def require_memory(self, *, device_bytes: int, host_bytes: int) -> None:
        """Raises `ConfigError`, in one line, when the two tiers cannot fit the memory that is free now."""


def describe(error: BaseException) -> str:
    """One line for messages and results."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def free_host_memory() -> int:
    """Bytes this process can still get: free memory of the machine, or less where a limit on it is lower."""
    import psutil  # here, so that only a worker that allocates needs it

    free: int = psutil.virtual_memory().available
    left = memory_limits.room()
    return free if left is None else min(free, left)


def require(what: str, needed: int, free: int) -> None:
    """Raises `ConfigError` when `what` needs more bytes than there are."""
    if needed > free:
        raise ConfigError(
            f"{what} needs {needed / GIB:.2f} GiB but only {free / GIB:.2f} GiB of memory is free: lower its size"
        )
