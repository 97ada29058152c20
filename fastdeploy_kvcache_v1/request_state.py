"""RequestState: what the cache manager knows of one request."""

from __future__ import annotations

from dataclasses import dataclass, field

from .errors import CacheStateError
from .invariants import expect
from .metadata import BlockHashes, DeviceSlot
from .run import Run


@dataclass
class RequestState:
    """A block table, and how much of it the tree knows. The manager's lock covers it."""

    request_id: str
    sequence: BlockHashes
    leaf: Run
    """Last cached run of its prefix; the path to it is pinned by this request."""
    num_cached: int
    """Leading blocks of its table that the tree knows."""
    epoch: int
    step: int = -1
    """The scheduling step of its last allocation."""
    num_tokens: int = 0
    """Tokens it has been allocated for."""
    num_closed_tokens: int = 0
    """Those of them that an earlier step than `step` allocated."""
    table: list[DeviceSlot] = field(default_factory=list)
    admitted: bool = False
    has_committed: bool = False
    duplicates: list[DeviceSlot] = field(default_factory=list)
    """Own slots among the first `num_cached`: the tree holds another copy of those blocks."""
    num_device_tokens: int = 0
    num_host_tokens: int = 0
    num_query_tokens: int = 0

    def own_slots(self) -> list[DeviceSlot]:
        return self.table[self.num_cached :] + self.duplicates

    @property
    def num_own_slots(self) -> int:
        return max(0, len(self.table) - self.num_cached) + len(self.duplicates)

    def admit(self, num_host_tokens: int, block_size: int) -> None:
        """Its table begins with its cached blocks, `num_host_tokens` of whose tokens come from the host."""
        self.admitted = True
        self.num_host_tokens = num_host_tokens
        self.num_device_tokens = self.num_cached * block_size - num_host_tokens
        self.num_query_tokens = self.sequence.num_tokens

    def grow(self, slots: list[DeviceSlot], num_tokens: int, step: int) -> None:
        """With `slots` its table holds `num_tokens` tokens; they were allocated in `step`."""
        self.table += slots
        if self.step != step:
            self.step, self.num_closed_tokens = step, self.num_tokens
        self.num_tokens = max(self.num_tokens, num_tokens)

    def committable_blocks(self, num_computed_tokens: int, block_size: int, *, open_step: int | None) -> int:
        """Full blocks among its first `num_computed_tokens` tokens, the newest token of the sequence never counted.

        Raises `CacheStateError` for tokens that have no block, blocks that have no hash, and tokens that were allocated
        in `open_step`, which nobody can have computed.
        """
        num_blocks = min(num_computed_tokens, self.sequence.num_tokens - 1) // block_size
        if self.step == open_step and num_computed_tokens > self.num_closed_tokens:
            raise CacheStateError(f"request {self.request_id}: committed before take_swap_step closed its step")
        if num_computed_tokens > len(self.table) * block_size:
            raise CacheStateError(f"request {self.request_id}: {num_computed_tokens} tokens committed, fewer allocated")
        if num_blocks > len(self.sequence.hashes):
            raise CacheStateError(f"request {self.request_id}: {num_blocks} blocks committed, fewer hashed")
        return num_blocks

    def check(self, path: list[Run]) -> None:
        """Raises `InvariantError` unless its table begins with the blocks of `path`, the cached prefix."""
        num_blocks = sum(len(run.hashes) for run in path)
        expect(num_blocks == self.num_cached, f"manager: {self.request_id} miscounts its cached blocks")
        if not self.admitted:
            expect(not self.table, f"manager: {self.request_id} has a block table before it was admitted")
            return
        own = set(self.duplicates)
        cached = [slot for run in path for slot in run.device or ()]
        wrong = [mine for mine, slot in zip(self.table, cached, strict=False) if mine != slot and mine not in own]
        intact = not wrong and len(cached) == self.num_cached
        expect(intact, f"manager: {self.request_id} reads slots of other blocks")
