"""CacheSnapshot: a bounded description of the cache, for debug pages and tests."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

from ..contract.messages import BlockHash, CacheLevel, DeviceSlot, HostSlot
from .block_pool import BlockPool
from .run import DEVICE, HOST, WIDTH, Cells, Run

MOST_BLOCKS = 2048
"""Largest number of blocks that a snapshot lists."""


@dataclass(frozen=True, slots=True)
class TierSnapshot:
    """Blocks of one tier. `size` is the sum of `free`, `cached`, `private` and `draining`."""

    size: int
    free: int
    cached: int
    """Blocks of the prefix tree, and blocks that were forgotten while a request used them."""
    private: int
    """Blocks that are lent, filled by a load, or computed by a request and not committed yet."""
    draining: int
    """Blocks without an owner that a store still reads."""
    held: int
    """Blocks with an owner that a store reads."""
    unlisted: int
    """Cached blocks that `CacheSnapshot.runs` leaves out."""


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """Consecutive blocks of a prompt that are in the same tiers and have the same users."""

    name: str
    """Digest of the first block under a random key of this `CacheManager`. It names the same block in each of its
    snapshots, and cannot be computed from a prompt."""
    parent: int | None
    """Index in `CacheSnapshot.runs` of the run with the blocks before; None at the start of a prompt."""
    num_blocks: int
    device_slots: tuple[DeviceSlot, ...]
    """In prompt order. Empty if the run is not on the device. Has fewer slots than blocks if the run is cut short."""
    host_slots: tuple[HostSlot, ...]
    """As `device_slots`, on the host."""
    num_stored: int
    """Listed blocks that are known to be in storage."""
    pins: int
    """Number of requests that use it."""
    use_class: int
    """Class of the adaptive eviction: how often requests found these blocks."""
    filling: str | None
    """Tier that a planned copy fills: `device` or `host`."""
    forgotten: bool
    """True if it cannot be found any more and waits for its last user."""


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    """The cache at one moment. Sizes are in blocks of `block_size` tokens."""

    block_size: int
    num_requests: int
    device: TierSnapshot
    host: TierSnapshot
    runs: tuple[RunSnapshot, ...]
    """Parents before children, the newest prompt first, forgotten runs last."""


class SeenRun(NamedTuple):
    """A copy of a run, made under the lock. It has few objects, which do not trigger the garbage collector there."""

    cells: Cells
    """Cells of the listed blocks."""
    parent: int | None
    num_blocks: int
    on_device: bool
    on_host: bool
    pins: int
    use_class: int
    filling: CacheLevel | None
    forgotten: bool

    def slots(self, tier: int) -> Cells:
        """Slots of the listed blocks in `DEVICE` or `HOST`; empty if the run is not there."""
        return self.cells[tier::WIDTH] if (self.on_device if tier == DEVICE else self.on_host) else []


def look(root: Run, forgotten: Iterable[Run], most_blocks: int) -> list[SeenRun]:
    """Copy runs of at most `most_blocks` blocks: those below `root`, then the `forgotten` ones. O(most_blocks)."""
    seen: list[SeenRun] = []
    left = min(most_blocks, MOST_BLOCKS)
    for run, parent in _newest_first(root, forgotten):
        if left <= 0:
            break
        end = min(run.end, run.start + left)
        left -= end - run.start
        cells, in_host = run.cells[WIDTH * run.start : WIDTH * end], run.host is not None
        users = run.pins, run.use_class, run.open, run.detached
        seen.append(SeenRun(cells, parent, run.length, run.on_device, in_host, *users))
    return seen


def _newest_first(root: Run, forgotten: Iterable[Run]) -> Iterator[tuple[Run, int | None]]:
    """Yield each run with the index of its parent. O(1) per run, independent of its number of children."""
    stack: list[tuple[int | None, Iterator[Run]]] = [(None, reversed(root.children.values()))]
    count = 0
    while stack:
        parent, children = stack[-1]
        run = next(children, None)
        if run is None:
            stack.pop()
            continue
        yield run, parent
        stack.append((count, reversed(run.children.values())))
        count += 1
    for run in forgotten:
        yield run, None


def count(pool: BlockPool[Any], num_private: int, num_listed: int) -> TierSnapshot:
    """Count the blocks of `pool`: `num_private` have owners outside the tree, `num_listed` are in listed runs."""
    cached = pool.num_owned - num_private
    draining = pool.size - pool.num_free - pool.num_owned
    return TierSnapshot(pool.size, pool.num_free, cached, num_private, draining, pool.num_held, cached - num_listed)


def describe(seen: Iterable[SeenRun], key: bytes, stored: Container[BlockHash]) -> tuple[RunSnapshot, ...]:
    """Describe runs without their hashes. Needs no lock."""
    return tuple(
        RunSnapshot(
            blake2b(run.cells[0], digest_size=8, key=key).hexdigest(),
            run.parent,
            run.num_blocks,
            tuple(run.slots(DEVICE)),
            tuple(run.slots(HOST)),
            sum(block in stored for block in run.cells[::WIDTH]),
            run.pins,
            run.use_class,
            None if run.filling is None else run.filling.value,
            run.forgotten,
        )
        for run in seen
    )
