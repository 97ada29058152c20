"""RequestState: what the cache manager knows of one request."""

from __future__ import annotations

from dataclasses import dataclass, field

from .metadata import BlockHashes, DeviceSlot
from .run import Run, expect


@dataclass
class RequestState:
    """A block table, and how much of it the tree knows. The manager's lock covers it."""

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

    def check(self, request_id: str, path: list[Run]) -> None:
        """Raises `InvariantError` unless its table begins with the blocks of `path`, the cached prefix."""
        expect(sum(map(len, path)) == self.num_cached, f"manager: {request_id} miscounts its cached blocks")
        if not self.admitted:
            expect(not self.table, f"manager: {request_id} has a block table before it was admitted")
            return
        own = set(self.duplicates)
        cached = [slot for run in path for slot in run.device or ()]
        wrong = [mine for mine, slot in zip(self.table, cached, strict=False) if mine != slot and mine not in own]
        expect(not wrong and len(cached) == self.num_cached, f"manager: {request_id} reads slots of other blocks")
