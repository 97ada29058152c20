"""Types and messages shared by the scheduler half and the worker half.

Everything here is picklable and free of paddle, cupy and fastdeploy. The worker never sees the prefix tree: it
receives `SwapStep`s and answers with `WorkerReport`s.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NewType, Protocol

from ..errors import UnsupportedCopyError
from ..telemetry.metrics import counter, gauge, part, source

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
"""Index of a block in the device caches (what block tables hold)."""

HostSlot = NewType("HostSlot", int)
"""Index of a block in the page-locked host pool."""


class CacheLevel(enum.Enum):
    """A tier that can hold a block's KV."""

    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"


class CacheAccess(NamedTuple):
    """What a request may do with the cache: tiers, storage, and blocks that the same batch computes for another one."""

    reads: bool = True
    """False: all its tokens are computed, also after a preemption."""
    writes: bool = True
    """False: what it computes is never found, not even by itself."""


class BlockHashes(Protocol):
    """The hashed token sequence of a request; grows while the request generates.

    `block_hashing.BlockHasher` computes it from token ids; `block_hashing.GivenHashes` wraps known hashes.
    """

    @property
    def hashes(self) -> Sequence[BlockHash]:
        """One chained hash per *full* block, in prompt order."""

    @property
    def num_tokens(self) -> int:
        """All tokens so far, prompt and output, the last partial block included."""

    @property
    def num_plain_blocks(self) -> int:
        """How many of the first full blocks are named by their token ids alone: no multimodal item, adapter or tenant
        decides their bytes, too.
        """

    @property
    def access(self) -> CacheAccess:
        """Fixed for the life of the request."""


class MatchedSpan(NamedTuple):
    """Consecutive blocks of a match that the same tier serves."""

    length: int
    """In blocks."""
    level: CacheLevel
    """`HOST` if they need device slots and a copy into them; `DEVICE` also if another request of this step has planned
    that copy already."""


@dataclass(frozen=True)
class MatchResult:
    """What `CacheManager.match_prefix` found, in prompt order. The blocks stay pinned until the request ends."""

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
        """Device slots that the first `allocate` adds for blocks of the match."""
        return self.num_blocks - self.num_device_blocks


class Allocation(NamedTuple):
    """Effects of one successful `CacheManager.allocate`."""

    new_blocks: list[DeviceSlot]
    """What this call added to the end of the request's block table (cached prefix blocks are not in it)."""
    num_device_tokens: int
    """Tokens served from the device tier; 0 after the request's first allocation."""
    num_host_tokens: int
    """Tokens whose swap-in from the host tier this allocation planned; 0 after the first allocation."""

    @property
    def num_cached_tokens(self) -> int:
        return self.num_device_tokens + self.num_host_tokens


class NoSpace(NamedTuple):
    """There are not enough slots. No state was changed."""

    needed: int
    available: int


class LoadSlots(NamedTuple):
    """What `CacheManager.begin_load` lends."""

    slots: tuple[int, ...]
    """Of the load's tier, for its first blocks in prompt order: fewer than it has blocks where room is short."""
    after_step: int
    """No byte may arrive before the worker has begun this swap step (-1: at once), and then only after the copies and
    passes that use these slots by then: until that step their old content may still be read.
    """


class StoreSource(NamedTuple):
    """Blocks that `CacheManager.begin_store` or `begin_device_store` keeps in their slots. None if they are gone."""

    hashes: tuple[BlockHash, ...]
    slots: tuple[int, ...]
    """Where each of them is."""


CopyKind = tuple[CacheLevel, CacheLevel]
"""From which tier to which."""

SWAP_OUT: CopyKind = (CacheLevel.DEVICE, CacheLevel.HOST)
SWAP_IN: CopyKind = (CacheLevel.HOST, CacheLevel.DEVICE)

COPY_ORDER: tuple[CopyKind, ...] = (SWAP_OUT, SWAP_IN)
"""The order in which one step runs its copies; the step computes after all of them.

A swap-in may fill a device slot that a swap-out of the same step reads, and compute reads what swap-ins fill. A new
kind of copy is one entry here and one copy path in the worker.
"""


@dataclass(frozen=True)
class BlockCopies:
    """Block copies of one kind: `source_slots[i]` of tier `source` goes to `target_slots[i]` of tier `target`.

    Target slots are unique within one object, so its copies may run in any order. Slots are a tuple, or a `SlotArray`
    where they come from a message.
    """

    source: CacheLevel
    target: CacheLevel
    source_slots: Sequence[int] = ()
    target_slots: Sequence[int] = ()

    def __post_init__(self) -> None:
        if len(self.source_slots) != len(self.target_slots):
            raise ValueError(
                f"swap metadata needs one target per source, got {len(self.source_slots)} and {len(self.target_slots)}"
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
    """All copies decided for one scheduling step. The worker runs `transfers` from the first to the last, then compute.

    At most one transfer per kind, none empty, in `COPY_ORDER`; `ValueError` otherwise, `UnsupportedCopyError` for a
    kind that `COPY_ORDER` lacks. Steps must reach the worker in `step` order, none twice: a later step's copies rely
    on an earlier step's.
    """

    step: int
    transfers: tuple[BlockCopies, ...] = ()

    @classmethod
    def of(cls, step: int, *transfers: BlockCopies) -> SwapStep:
        """The `transfers` that copy anything, in the order in which a step runs them."""
        return cls(step, tuple(sorted([each for each in transfers if each.source_slots], key=_rank)))

    def __post_init__(self) -> None:
        last = -1
        for transfer in self.transfers:
            rank = _rank(transfer)
            if rank <= last or not transfer.source_slots:
                kinds = [(each.source.value, each.target.value) for each in self.transfers]
                raise ValueError(f"swap step {self.step} has copies that are empty, doubled or out of order: {kinds}")
            last = rank

    @property
    def swap_out(self) -> BlockCopies:
        """Its copies from the device to the host."""
        return next((each for each in self.transfers if each.kind == SWAP_OUT), NO_SWAP_OUT)

    @property
    def swap_in(self) -> BlockCopies:
        """Its copies from the host to the device."""
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
    """Run `swap_steps`, one after another, do what `transfers` say, then compute `requests`. Not thread-safe.

    Swap steps stay separate, in step order: merging the copies of two steps would let a later step's swap-out read a
    slot before the earlier step's swap-in filled it.
    """

    requests: list[Any] = field(default_factory=list)
    swap_steps: list[SwapStep] = field(default_factory=list)
    transfers: list[Any] = field(default_factory=list)
    """For the transfer desks of the rank: see `transfer/rank_messages.py`."""

    def __bool__(self) -> bool:
        return bool(self.requests or self.swap_steps or self.transfers)


@dataclass(frozen=True)
class CopyResult:
    """What became of one transfer of one `SwapStep`; failed ones invalidate their target slots."""

    step: int
    source: CacheLevel
    target: CacheLevel
    num_blocks: int
    num_bytes: int
    seconds: float
    target_slots: tuple[int, ...] = field(default=())
    """Filled for failed transfers only: the slots that hold no valid data."""
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None


class PassProgress(NamedTuple):
    """How far a rank's forward passes are. Times are those of `time.monotonic`, which processes of a machine share."""

    step: int
    """The last swap step that the rank had taken at time `at`; -1 for none."""
    at: float
    """Every pass that was submitted before has ended, on the device itself. Later ones know what `step` said."""
    is_idle: bool = False
    """Nothing ran at time `at`, and nothing will before the rank takes a later step."""


def positions(start: int, end: int) -> float:
    """What attention costs more behind a longer context: tokens `[start, end)` times the tokens before them."""
    return (end * end - start * start) / 2


class PrefillTime(NamedTuple):
    """A forward pass that computed prompts, as the worker measures it and `PrefillCosts` learns from it."""

    num_tokens: int
    """Of prompts. What decodes in the same pass is not counted, though it takes some of the time."""
    num_positions: float
    """See `positions`, summed over the prompts."""
    seconds: float
    """In which it did not stand still for copies."""

    @classmethod
    def of(cls, chunks: Iterable[tuple[int, int]], seconds: float) -> PrefillTime:
        """A pass that computed tokens `[start, end)` of each prompt."""
        chunks = list(chunks)
        return cls(sum(end - start for start, end in chunks), sum(positions(*chunk) for chunk in chunks), seconds)


class CopyPath(NamedTuple):
    """A way in which a worker can copy blocks in one direction."""

    direction: str
    """`in`: into the device, `out`: out of it."""
    name: str
    """`c` or `numpy` on a CPU; on a GPU `kernel`, `batch` or `spans`."""
    left: str = ""
    """Why it is not used; empty for one that is used where it is the cheapest."""

    @property
    def is_used(self) -> bool:
        return not self.left


@dataclass
class CopyTotals:
    """One direction of copies."""

    blocks: int = counter("Blocks that a worker rank copied")
    bytes: int = counter("Bytes that a worker rank copied")
    seconds: float = counter("Time that a worker rank's copies took")
    failures: int = counter("Copies of a worker rank that failed", "transfer_failures")


@source("worker rank", "rank")
@dataclass
class RankCopies:
    """Everything that a worker rank counts, since its start. The worker writes, and its reports carry all of it: a new
    number is a field here, and both servers show it. One thread writes; any thread may read single fields.
    """

    swap_in: CopyTotals = part(CopyTotals, "swap_", direction="in")
    swap_out: CopyTotals = part(CopyTotals, "swap_", direction="out")
    exposed_wait_total_s: float = counter("Time that compute waited for copies", "exposed_wait_seconds")
    paths: tuple[CopyPath, ...] = gauge(
        "1 for a way in which blocks are copied, 0 for one that was left, and why",
        "copy_path",
        each=("direction", "path", "reason"),
        default=(),
    )

    def add(self, result: CopyResult) -> None:
        """A copy has ended."""
        totals = self.swap_in if result.target is CacheLevel.DEVICE else self.swap_out
        totals.seconds += result.seconds
        if result.ok:
            totals.blocks += result.num_blocks
            totals.bytes += result.num_bytes
        else:
            totals.failures += 1

    def snapshot(self) -> RankCopies:
        """These numbers in an object of their own, for a report that is encoded while the worker goes on counting."""
        return replace(self, swap_in=replace(self.swap_in), swap_out=replace(self.swap_out))


@dataclass(frozen=True)
class WorkerReport:
    """Copies that ended since the last report."""

    transfers: tuple[CopyResult, ...] = ()
    exposed_wait_since_last_s: float = 0.0
    """Seconds that compute waited for copies since the last report."""
    ended_through: int = -1
    """No copy of this swap step or an earlier one runs any more, and what became of it is in this report or in an
    earlier one. Copies that never reached the worker count as ended, too.
    """
    passes: PassProgress | None = None
    """None without news, and from workers that are asked for none."""
    prefills: tuple[PrefillTime, ...] = ()
    """Passes of FastDeploy's workers that ended since the last report; the embedded engine has a clock of its own."""
    copies: RankCopies | None = None
    """Totals at the time of the report."""


class CacheEvent(NamedTuple):
    """A change that an outside index of this cache must learn, in order."""

    kind: str
    """`stored`, `removed`, or `cleared` (forget everything: the cache was reset or events were lost)."""
    level: CacheLevel | None
    hashes: tuple[BlockHash, ...] = ()
    parent: BlockHash | None = None
    """Hash of the block before the first stored one; None at the root and for other kinds."""
