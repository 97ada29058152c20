"""EvictedPieces: remembers what left the cache, and why.

A *piece* is a run of blocks that left at once. Eviction takes leaves first, so the first block that a prompt misses
later is the first block of a piece. A table with one entry per block would cost more than the cache manager itself.
"""

from __future__ import annotations

from collections.abc import Callable

from ...contract.messages import BlockHash
from ...contract.misses import MissReason
from ..run import WIDTH, Run

BLOCKS_PER_PIECE = 13
"""A generation has a piece for so many blocks that the cache can hold, which are 10 bytes a block at most."""
FEWEST_BLOCKS = 1000
"""A smaller cache has the table of one with so many blocks: 24 KB."""
FADED_BYTES = 3
"""For each block that the cache can hold."""
TICKS_PER_SECOND = 16

CHECK_MASK, LENGTH_MASK, CAUSE_MASK, TIME_MASK = 0xFF, 0xFFFF, 7, (1 << 31) - 1
LENGTH_AT, CAUSE_AT, TIME_AT, NUMBER_AT = 8, 24, 27, 58
"""First bits of the fields of a piece, behind the first byte of the hash of its last block."""

CAUSES = (
    MissReason.EVICTED_DEVICE,
    MissReason.EVICTED_HOST,
    MissReason.RESET,
    MissReason.COPY_FAILED,
)
EVICTED_DEVICE, EVICTED_HOST, RESET, COPY_FAILED = range(len(CAUSES))

FADED = -1
"""A forgotten piece."""


def length_of(piece: int) -> int:
    return piece >> LENGTH_AT & LENGTH_MASK


def cause_of(piece: int) -> int:
    return piece >> CAUSE_AT & CAUSE_MASK


def ends_on(piece: int, block: BlockHash) -> bool:
    """True if `block` is the last one of `piece`. Wrong for one other block in 256."""
    return block[0] == piece & CHECK_MASK


class EvictedPieces:
    """A bounded table: at most 24 bytes for each block that the cache can hold, or 24 KB in a small one.

    A piece is an integer: the number of blocks that had left before it, time, cause, length, and a byte of its last
    hash. There are two generations, of which the older one is forgotten as a whole. Of each forgotten piece a byte is
    left, which tells it from new blocks until another one takes its place. Not thread-safe.
    """

    def __init__(self, clock: Callable[[], float], num_blocks: int) -> None:
        self._clock = clock
        self.num_left = 0
        """Blocks that have left."""
        self._start = clock()
        self.look_at_clock()
        self.resize(num_blocks)

    def resize(self, num_blocks: int) -> None:
        """Forget all: the cache can hold `num_blocks` from now on. O(num_blocks)."""
        num_blocks = max(num_blocks, FEWEST_BLOCKS)
        self._most = num_blocks // BLOCKS_PER_PIECE
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._faded = bytearray(FADED_BYTES * num_blocks + 1)

    def __sizeof__(self) -> int:
        numbers = [number for table in (self._young, self._old) for piece in table.items() for number in piece]
        parts = self._young, self._old, self._faded, *numbers
        return object.__sizeof__(self) + sum(each.__sizeof__() for each in parts)

    def look_at_clock(self) -> None:
        """Let pieces that leave from here on have the present time. A call for each piece would cost too much."""
        self.now = self._clock()
        self._time_bits = (int((self.now - self._start) * TICKS_PER_SECOND) & TIME_MASK) << TIME_AT

    def add(self, run: Run, start: int, cause: int) -> None:
        """Remember that the blocks of `run` from `start` of its cells on leave the cache for `CAUSES[cause]`. O(1)."""
        cells, end, young, faded = run.cells, run.end, self._young, self._faded
        key, length, num_left = hash(cells[WIDTH * start]), end - start, self.num_left
        self.num_left = num_left + length
        if length > LENGTH_MASK:
            length = LENGTH_MASK
        ends_on = cells[WIDTH * end - WIDTH][0]
        young[key] = num_left << NUMBER_AT | self._time_bits | cause << CAUSE_AT | length << LENGTH_AT | ends_on
        faded[key % len(faded)] = key >> 32 & 0xFF or 1
        if len(young) >= self._most:
            self._young, self._old = {}, young

    def find(self, block: BlockHash) -> int:
        """Return the newest piece that begins with `block`, `FADED` if it was forgotten, or 0. O(1).

        `FADED` is wrong for one new block in 256 at most.
        """
        key, faded = hash(block), self._faded
        byte = faded[key % len(faded)]
        if not byte:  # no piece of this place was ever added
            return 0
        piece = self._young.get(key) or self._old.get(key)
        if piece is not None:
            return piece
        return FADED if byte == (key >> 32 & 0xFF or 1) else 0

    def seconds_since(self, piece: int) -> float:
        """Return how long ago `piece` left."""
        left_at = self._start + (piece >> TIME_AT & TIME_MASK) / TICKS_PER_SECOND
        return max(0.0, self._clock() - left_at)


def blocks_short(piece: int, num_left: int) -> int:
    """Count the blocks of `piece` and those that left after it, until `num_left` had left: a cache so much larger
    would still have held it then.
    """
    return num_left - (piece >> NUMBER_AT)
