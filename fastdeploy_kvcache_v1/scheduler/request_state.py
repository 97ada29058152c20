"""RequestState: what the cache manager knows of one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..contract.messages import BlockHashes, DeviceSlot
from ..errors import CacheStateError
from .invariants import expect
from .reuse.watched import Group
from .run import Run


@dataclass(eq=False, slots=True)
class RequestState:
    """A request's block table is the device slots of its cached prefix, which the tree holds, and its own slots."""

    request_id: str
    sequence: BlockHashes
    leaf: Run
    """Last cached run of its prefix; the path to it is pinned by this request."""
    num_cached: int
    """Leading blocks of its table that the tree knows."""
    writes: bool
    """What it computes is to be cached; not after a reset of the cache that it goes on from."""
    resumed: bool
    """It ran before and was preempted."""
    step: int = -1
    """The scheduling step of its last allocation."""
    num_tokens: int = 0
    """Tokens it has been allocated for."""
    num_closed_tokens: int = 0
    """Tokens among them that a step before `step` allocated."""
    tail: list[DeviceSlot] = field(default_factory=list)
    """Own slots of the blocks behind the cached ones."""
    duplicates: dict[int, DeviceSlot] = field(default_factory=dict)
    """Own slots among the first `num_cached`, by block: the tree holds another copy of those blocks."""
    admitted: bool = False
    has_committed: bool = False
    num_host_tokens: int = 0
    """Of its cached ones when it was admitted, those that came from the host."""
    num_query_tokens: int = 0
    watched: Sequence[Group] = ()
    """Of its blocks, what `ReuseHistory` knew when it was admitted."""

    @property
    def may_cache(self) -> bool:
        """What is computed on top of blocks that were reset or lost is never to be found."""
        return self.writes and not self.leaf.detached

    @property
    def num_blocks(self) -> int:
        """Length of its block table."""
        return self.num_cached + len(self.tail) if self.admitted else 0

    def block_table(self) -> list[DeviceSlot]:
        """A new list. O(its blocks)."""
        if not self.admitted:
            return []
        table: list[DeviceSlot] = []
        for run in self.leaf.path():
            table += run.device_slots
        for index, slot in self.duplicates.items():
            table[index] = slot
        return table + self.tail

    def own_slots(self) -> list[DeviceSlot]:
        return [*self.tail, *self.duplicates.values()]

    def grow(self, slots: Sequence[DeviceSlot], num_tokens: int, step: int) -> None:
        """With `slots` its table holds `num_tokens` tokens; they were allocated in `step`."""
        self.tail += slots
        if self.step != step:
            self.step, self.num_closed_tokens = step, self.num_tokens
        self.num_tokens = max(self.num_tokens, num_tokens)

    def adopt(self, slots: Sequence[DeviceSlot], block_size: int) -> None:
        """Its table goes on with `slots`; the caller, who owned them, knows when all their tokens can be computed."""
        self.tail += slots
        self.num_tokens = max(self.num_tokens, self.num_blocks * block_size)

    def cache(self, runs: Sequence[Run], slots: Sequence[DeviceSlot], duplicates: Sequence[int]) -> None:
        """The tree holds the blocks of `slots`, the first ones behind the cached ones, in `runs` now: in other slots
        where the index is in `duplicates`.
        """
        del self.tail[: len(slots)]
        for index in duplicates:
            self.duplicates[self.num_cached + index] = slots[index]
        self.leaf = runs[-1]
        self.num_cached += len(slots)
        self.has_committed = True

    def committable_blocks(self, num_computed_tokens: int, block_size: int, *, open_step: int) -> int:
        """Full blocks among its first `num_computed_tokens` tokens, the newest token of the sequence never counted.

        Raises `CacheStateError` for tokens that have no block, blocks that have no hash, and tokens that were allocated
        in `open_step`, which cannot have been computed yet.
        """
        num_blocks = min(num_computed_tokens, self.sequence.num_tokens - 1) // block_size
        if self.step == open_step and num_computed_tokens > self.num_closed_tokens:
            raise CacheStateError(f"request {self.request_id}: committed before take_swap_step closed its step")
        if num_computed_tokens > self.num_blocks * block_size:
            room = self.num_blocks * block_size
            raise CacheStateError(f"request {self.request_id}: {num_computed_tokens} tokens committed, room for {room}")
        if num_blocks > len(self.sequence.hashes):
            num_hashed = len(self.sequence.hashes)
            raise CacheStateError(f"request {self.request_id}: {num_blocks} blocks committed, {num_hashed} hashed")
        return num_blocks

    def check(self, path: Sequence[Run]) -> None:
        """Raises `InvariantError` unless `path` is the cached prefix, and on the device once it is admitted."""
        num_blocks = sum(run.length for run in path)
        expect(num_blocks == self.num_cached, f"manager: {self.request_id} miscounts its cached blocks")
        if not self.admitted:
            expect(not self.own_slots(), f"manager: {self.request_id} has a block table before it was admitted")
            return
        expect(all(run.on_device for run in path), f"manager: {self.request_id} reads blocks that are not there")
        inside = all(0 <= index < self.num_cached for index in self.duplicates)
        expect(inside, f"manager: {self.request_id} owns slots of blocks that it does not have")
