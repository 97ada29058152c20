"""RequestState: what the cache manager knows of one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..contract.messages import BlockHash, BlockHashes, DeviceSlot
from ..errors import CacheStateError
from .invariants import expect
from .reuse.history import Visit
from .run import Run


@dataclass(eq=False, slots=True)
class RequestState:
    """One request. Its block table is the device slots of its cached prefix, owned by the tree, then its own slots."""

    request_id: str
    sequence: BlockHashes
    leaf: Run
    """Last run of its cached prefix. The request pins the path to it."""
    num_cached: int
    """Number of leading blocks of its table that the tree holds."""
    writes: bool
    """True if its blocks are to be cached. A reset of the cache makes it False."""
    resumed: bool
    """True if it ran before and was preempted."""
    limit: int = 0
    """Number of leading blocks that could have been hits."""
    num_left: int = 0
    """Blocks that had left the cache before it was admitted."""
    computes: BlockHash | None = None
    """Its first block that is not cached yet, if `Misses` knows it as the one that computes it."""
    step: int = -1
    """Scheduling step of its last allocation."""
    num_tokens: int = 0
    """Tokens that its block table was allocated for."""
    num_closed_tokens: int = 0
    """Tokens of these that a step before `step` allocated."""
    tail: list[DeviceSlot] = field(default_factory=list)
    """Own slots behind the cached blocks."""
    duplicates: dict[int, DeviceSlot] = field(default_factory=dict)
    """Own slots by block index among the first `num_cached`: the tree holds another copy of these blocks."""
    admitted: bool = False
    has_committed: bool = False
    num_host_tokens: int = 0
    """Cached tokens that came from the host when it was admitted."""
    num_query_tokens: int = 0
    start: tuple[int, float, int] | None = None
    """Step, time and hit blocks of its admission, once it counts."""
    computed: int = 0
    """Step after its last commit of a block of the prompt."""
    grown: int = 0
    """Step after its last commit of a block of the output."""
    visit: Visit | None = None
    """Its session and groups in `ReuseHistory` when it was admitted."""

    @property
    def may_cache(self) -> bool:
        """False if its prefix was reset or lost: blocks on top of it must never be found."""
        return self.writes and not self.leaf.detached

    @property
    def num_blocks(self) -> int:
        return self.num_cached + len(self.tail) if self.admitted else 0

    def block_table(self) -> list[DeviceSlot]:
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
        """Append `slots`, allocated in `step`, so that the table holds `num_tokens` tokens."""
        self.tail += slots
        if self.step != step:
            self.step, self.num_closed_tokens = step, self.num_tokens
        self.num_tokens = max(self.num_tokens, num_tokens)

    def adopt(self, slots: Sequence[DeviceSlot], block_size: int) -> None:
        """Append `slots` that the caller owned. The caller decides when their tokens can be committed."""
        self.tail += slots
        self.num_tokens = max(self.num_tokens, self.num_blocks * block_size)

    def cache(self, runs: Sequence[Run], slots: Sequence[DeviceSlot], duplicates: Sequence[int]) -> None:
        """Record that the tree holds the blocks of `slots`, the first ones of `tail`, in `runs` now. At indices in
        `duplicates` it holds them in other slots.
        """
        del self.tail[: len(slots)]
        for index in duplicates:
            self.duplicates[self.num_cached + index] = slots[index]
        self.leaf = runs[-1]
        self.num_cached += len(slots)
        self.has_committed = True

    def committable_blocks(self, num_computed_tokens: int, block_size: int, *, open_step: int) -> int:
        """Count the full blocks among its first `num_computed_tokens` tokens. Raises as `CacheManager.commit` does."""
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
        """Raise `InvariantError` unless `path` is the cached prefix, on the device if the request is admitted."""
        num_blocks = sum(run.length for run in path)
        expect(num_blocks == self.num_cached, f"manager: {self.request_id} miscounts its cached blocks")
        if not self.admitted:
            expect(not self.own_slots(), f"manager: {self.request_id} has a block table before it was admitted")
            return
        expect(all(run.on_device for run in path), f"manager: {self.request_id} reads blocks off the device")
        inside = all(0 <= index < self.num_cached for index in self.duplicates)
        expect(inside, f"manager: {self.request_id} owns slots of blocks that it does not have")
