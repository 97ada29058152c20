"""Types and messages of both halves, picklable and free of paddle, cupy and fastdeploy.

The worker never sees the prefix tree: it receives `SwapStep`s and answers with `WorkerReport`s.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NewType, Protocol

from ..errors import UnsupportedCopyError
from ..telemetry.metrics import counter, gauge, part, source
from .sessions import SessionHint

__all__ = [
    "COPY_ORDER",
    "NO_SWAP_IN",
    "NO_SWAP_OUT",
    "SWAP_IN",
    "SWAP_OUT",
    "Allocation",
    "BatchRequest",
    "BlockCopies",
    "BlockHash",
    "BlockHashes",
    "CacheAccess",
    "CacheEvent",
    "CacheLevel",
    "CopyKind",
    "CopyPath",
    "CopyResult",
    "CopyTotals",
    "DeviceSlot",
    "HostSlot",
    "LoadSlots",
    "MatchResult",
    "MatchedSpan",
    "NoSpace",
    "PassProgress",
    "PrefillTime",
    "RankCopies",
    "StoreSource",
    "SwapStep",
    "WorkerReport",
    "positions",
]

BlockHash = NewType("BlockHash", bytes)
"""Chained 32-byte SHA-256 digest that names a block together with its whole prefix."""
DeviceSlot = NewType("DeviceSlot", int)
"""Index of a block in the device caches, as in block tables."""
HostSlot = NewType("HostSlot", int)
"""Index of a block in the page-locked host pool."""


class CacheLevel(enum.Enum):
    """A tier that can hold a block's KV."""

    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"


class CacheAccess(NamedTuple):
    """A request's access to all tiers, to storage, and to blocks that its batch computes for another request."""

    reads: bool = True
    """False: all its tokens are computed, also after a preemption."""
    writes: bool = True
    """False: no request finds its blocks, not even this one."""


class BlockHashes(Protocol):
    """The hashed token sequence of a request; grows while the request generates. See `scheduler/block_hashing.py`."""

    @property
    def hashes(self) -> Sequence[BlockHash]:
        """One chained hash per *full* block, in prompt order."""

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far, the last partial block included."""

    @property
    def num_plain_blocks(self) -> int:
        """First full blocks whose bytes depend on token ids alone, not on an image, adapter or tenant."""

    @property
    def access(self) -> CacheAccess:
        """Fixed for the life of the request."""

    @property
    def session(self) -> SessionHint:
        """Read when the request is admitted and when it ends."""


class MatchedSpan(NamedTuple):
    """Consecutive blocks of a match from one tier."""

    length: int
    """In blocks."""
    level: CacheLevel
    """`HOST` if they need device slots and a copy. `DEVICE` also if another request of this step planned that copy."""


class MatchResult(NamedTuple):
    """Hit of `CacheManager.match_prefix`, in prompt order. Its blocks stay pinned until the request ends."""

    request_id: str
    spans: tuple[MatchedSpan, ...]
    block_size: int

    @property
    def num_blocks(self) -> int:
        return sum(span.length for span in self.spans)

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def num_device_blocks(self) -> int:
        return sum(span.length for span in self.spans if span.level is CacheLevel.DEVICE)

    @property
    def num_host_blocks(self) -> int:
        """Also the device slots that the first `allocate` adds for the match."""
        return self.num_blocks - self.num_device_blocks


class Allocation(NamedTuple):
    """Effects of one successful `CacheManager.allocate`."""

    new_blocks: list[DeviceSlot]
    """Added to the end of the request's block table, cached prefix blocks not included."""
    num_device_tokens: int
    """Tokens served from the device tier; 0 after the request's first allocation."""
    num_host_tokens: int
    """Tokens for which this call planned a swap-in; 0 after the first allocation."""

    @property
    def num_cached_tokens(self) -> int:
        return self.num_device_tokens + self.num_host_tokens


class NoSpace(NamedTuple):
    """Too few slots are free. No state was changed."""

    needed: int
    available: int


class LoadSlots(NamedTuple):
    """Slots that `CacheManager.begin_load` lends."""

    slots: tuple[int, ...]
    """In the load's tier, for its first blocks in prompt order; fewer than its blocks if room is short."""
    after_step: int
    """No byte may arrive before the worker has begun this swap step (-1: at once). Copies and passes that use these
    slots by then must have ended: they may still read the old content.
    """


class StoreSource(NamedTuple):
    """Blocks that `CacheManager` keeps in `slots` for a store; empty if they are gone."""

    hashes: tuple[BlockHash, ...]
    slots: tuple[int, ...]
    parents: tuple[BlockHash | None, ...] = ()
    """Of `begin_store`: hash of the block before each block, None for the first one of a prompt."""


CopyKind = tuple[CacheLevel, CacheLevel]
"""Source tier, target tier."""
SWAP_OUT: CopyKind = (CacheLevel.DEVICE, CacheLevel.HOST)
SWAP_IN: CopyKind = (CacheLevel.HOST, CacheLevel.DEVICE)
COPY_ORDER: tuple[CopyKind, ...] = (SWAP_OUT, SWAP_IN)
"""The order of copies in one step, which then computes. A swap-in may fill a device slot that a swap-out of the same
step reads. Compute reads the slots that swap-ins fill.
"""


@dataclass(frozen=True)
class BlockCopies:
    """Block copies of one kind: `source_slots[i]` of tier `source` goes to `target_slots[i]` of tier `target`.

    Target slots are unique, so the copies may run in any order. Slots from a message are a `SlotArray`.
    """

    source: CacheLevel
    target: CacheLevel
    source_slots: Sequence[int] = ()
    target_slots: Sequence[int] = ()

    def __post_init__(self) -> None:
        if len(self.source_slots) != len(self.target_slots):
            raise ValueError(
                f"block copies need one target per source, got {len(self.target_slots)} for {len(self.source_slots)}"
            )

    @property
    def kind(self) -> CopyKind:
        return self.source, self.target

    def __len__(self) -> int:
        return len(self.source_slots)

    def __bool__(self) -> bool:
        return bool(self.source_slots)


NO_SWAP_OUT = BlockCopies(*SWAP_OUT)
NO_SWAP_IN = BlockCopies(*SWAP_IN)


@dataclass(frozen=True)
class SwapStep:
    """All copies of one scheduling step. The worker takes `refilled`, runs `transfers` in order, then computes.

    At most one transfer per kind, none empty, in `COPY_ORDER`; raises `ValueError` otherwise, `UnsupportedCopyError`
    for a kind that `COPY_ORDER` lacks. Steps must reach the worker once and in `step` order: later copies rely on
    earlier ones.
    """

    step: int
    transfers: tuple[BlockCopies, ...] = ()
    refilled: Sequence[int] = ()
    """Host slots that storage has filled: copies into them that failed before do not matter any more. A step without
    copies has none.
    """

    @classmethod
    def of(cls, step: int, *transfers: BlockCopies, refilled: Sequence[int] = ()) -> SwapStep:
        """A step of the `transfers` that copy anything, sorted."""
        return cls(step, tuple(sorted([each for each in transfers if each.source_slots], key=_rank)), refilled)

    def __post_init__(self) -> None:
        last = -1
        for transfer in self.transfers:
            rank = _rank(transfer)
            if rank <= last or not transfer.source_slots:
                kinds = [(each.source.value, each.target.value) for each in self.transfers]
                raise ValueError(f"swap step {self.step} has copies that are empty, duplicate or out of order: {kinds}")
            last = rank

    @property
    def swap_out(self) -> BlockCopies:
        return next((each for each in self.transfers if each.kind == SWAP_OUT), NO_SWAP_OUT)

    @property
    def swap_in(self) -> BlockCopies:
        return next((each for each in self.transfers if each.kind == SWAP_IN), NO_SWAP_IN)

    def __bool__(self) -> bool:
        return bool(self.transfers)


def _rank(transfer: BlockCopies) -> int:
    # By identity: hashing members of an enum costs more than the rest of a step's bookkeeping.
    for rank, (origin, target) in enumerate(COPY_ORDER):
        if transfer.source is origin and transfer.target is target:
            return rank
    raise UnsupportedCopyError(transfer.source.value, transfer.target.value)


@dataclass
class BatchRequest:
    """Run `swap_steps` one after another, then `transfers`, then compute `requests`. Not thread-safe.

    Steps are never merged: a later step's swap-out may read a slot that an earlier step's swap-in fills.
    """

    requests: list[Any] = field(default_factory=list)
    swap_steps: list[SwapStep] = field(default_factory=list)
    transfers: list[Any] = field(default_factory=list)
    """Commands of `transfer/rank_messages.py`."""

    def __bool__(self) -> bool:
        return bool(self.requests or self.swap_steps or self.transfers)


@dataclass(frozen=True)
class CopyResult:
    """Result of one transfer of one `SwapStep`."""

    step: int
    source: CacheLevel
    target: CacheLevel
    num_blocks: int
    num_bytes: int
    seconds: float
    target_slots: tuple[int, ...] = field(default=())
    """Of failed transfers only: slots without valid data."""
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None


class PassProgress(NamedTuple):
    """Progress of a rank's forward passes, in seconds of `time.monotonic`, which the processes of a machine share."""

    step: int
    """Last swap step that the rank had taken at time `at`; -1 for none."""
    at: float
    """Every pass submitted before has ended on the device. Later passes come behind `step`."""
    is_idle: bool = False
    """Nothing ran at time `at`, and nothing will before the rank takes a later step."""


def positions(start: int, end: int) -> float:
    """Attention pairs of tokens `[start, end)`: each token times the tokens before it."""
    return (end * end - start * start) / 2


class PrefillTime(NamedTuple):
    """Duration of a forward pass that computed prompts, for `PrefillCosts`."""

    num_tokens: int
    """Prompt tokens. Tokens that decode in the same pass are not counted, though they take some of the time."""
    num_positions: float
    """Sum of `positions` over the prompts."""
    seconds: float
    """Without waits for copies."""

    @classmethod
    def of(cls, chunks: Iterable[tuple[int, int]], seconds: float) -> PrefillTime:
        """Time of a pass over tokens `[start, end)` of each prompt."""
        chunks = list(chunks)
        return cls(sum(end - start for start, end in chunks), sum(positions(*chunk) for chunk in chunks), seconds)


class CopyPath(NamedTuple):
    """A way to copy blocks in one direction."""

    direction: str
    """`in` (to the device) or `out`."""
    name: str
    """`c`, `numpy` or `paddle`; on a GPU `kernel`, `batch`, `spans` or `paddle`."""
    left: str = ""
    """Reason why it is not used; empty for a path that is used where it is the fastest."""

    @property
    def is_used(self) -> bool:
        return not self.left


@dataclass
class CopyTotals:
    """Copies in one direction since the worker's start."""

    blocks: int = counter("Blocks that a worker rank copied")
    bytes: int = counter("Bytes that a worker rank copied")
    seconds: float = counter("Time that a worker rank's copies took")
    failures: int = counter("Copies of a worker rank that failed", "transfer_failures")


@source("worker rank", "rank")
@dataclass
class RankCopies:
    """Counts of a worker rank since its start. Both servers show every field. One thread writes, any thread may read
    single fields.
    """

    swap_in: CopyTotals = part(CopyTotals, "swap_", direction="in")
    swap_out: CopyTotals = part(CopyTotals, "swap_", direction="out")
    exposed_wait_total_s: float = counter(
        "Time that the worker's thread waited for copies; on a GPU streams wait instead", "exposed_wait_seconds"
    )
    paths: tuple[CopyPath, ...] = gauge(
        "1 for a copy path in use, 0 for a path that is not used, with the reason",
        "copy_path",
        each=("direction", "path", "reason"),
        default=(),
    )

    def add(self, result: CopyResult) -> None:
        totals = self.swap_in if result.target is CacheLevel.DEVICE else self.swap_out
        totals.seconds += result.seconds
        if result.ok:
            totals.blocks += result.num_blocks
            totals.bytes += result.num_bytes
        else:
            totals.failures += 1

    def snapshot(self) -> RankCopies:
        """Copy the counts, for a report that may be encoded while counting goes on."""
        return replace(self, swap_in=replace(self.swap_in), swap_out=replace(self.swap_out))


MOST_IN_A_REPORT = 256
"""Copies and prefill times that merged reports list: the latest. The engine can do without older ones."""


@dataclass(frozen=True)
class WorkerReport:
    """Copies that ended since the last report."""

    transfers: tuple[CopyResult, ...] = ()
    exposed_wait_since_last_s: float = 0.0
    """Seconds that compute waited for copies since the last report."""
    ended_through: int = -1
    """All copies of this swap step and earlier ones have ended and are reported. Copies that never reached the worker
    count as ended.
    """
    passes: PassProgress | None = None
    """None without news, or if the engine does not ask for it."""
    prefills: tuple[PrefillTime, ...] = ()
    """Passes of FastDeploy's workers since the last report. The embedded engine measures by itself."""
    copies: RankCopies | None = None
    """Totals at the time of the report."""
    unlisted_through: int = -1
    """Failures of this step and earlier ones may be missing from `transfers`: there were too many."""

    def merged(self, later: WorkerReport) -> WorkerReport:
        """One report that says what this one and the next one of the same rank say."""
        transfers = self.transfers + later.transfers
        unlisted = [each.step for each in transfers[:-MOST_IN_A_REPORT] if not each.ok]
        return WorkerReport(
            transfers[-MOST_IN_A_REPORT:],
            self.exposed_wait_since_last_s + later.exposed_wait_since_last_s,
            max(self.ended_through, later.ended_through),
            later.passes or self.passes,
            (self.prefills + later.prefills)[-MOST_IN_A_REPORT:],
            later.copies or self.copies,
            max(self.unlisted_through, later.unlisted_through, *unlisted),
        )


class CacheEvent(NamedTuple):
    """A change of the cache for an outside index, which must apply events in order."""

    kind: str
    """`stored`, `removed`, or `cleared` (drop everything: the cache was reset or events were lost)."""
    level: CacheLevel | None
    hashes: tuple[BlockHash, ...] = ()
    parent: BlockHash | None = None
    """Hash of the block before the first stored block; None at the root and for other kinds."""
