"""A data plane of names instead of bytes, which checks the content of each block.

Each slot holds the hash of the block last written to it. Swap steps run in the worker's order: transfers, then the
forward pass. A slot that is read must hold the expected hash.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256

import numpy as np
import numpy.typing as npt

from ...contract.messages import BlockCopies, BlockHash, CacheLevel, SwapStep
from ...errors import InvariantError

WORDS = 4
"""64-bit words of a 32-byte hash, the content of a slot. All zero: never written."""

Contents = npt.NDArray[np.uint64]
Slots = npt.NDArray[np.int64]


def content_of(request_id: str, hashes: Sequence[BlockHash], num_blocks: int) -> Contents:
    """Expected content of a request's first `num_blocks` blocks, `[num_blocks, WORDS]`: their hashes, and for a partial
    block a name that only this request expects.
    """
    partial = sha256(b"partial block of " + request_id.encode()).digest()
    names = [*hashes[:num_blocks], *([partial] * (num_blocks - len(hashes)))]
    return np.frombuffer(b"".join(names), dtype=np.uint64).reshape(num_blocks, WORDS)


@dataclass
class ShadowRequest:
    """A request's view of the device: block `i` of its table must hold `content[i]`."""

    request_id: str
    slots: Slots = field(default_factory=lambda: np.empty(0, np.int64))
    content: Contents = field(default_factory=lambda: np.empty((0, WORDS), np.uint64))
    first_written: int = 0
    """The next forward pass reads the blocks before this one and writes the others."""

    def plan(self, block_table: Sequence[int], hashes: Sequence[BlockHash], first_written: int) -> None:
        """Set the next forward pass of this request."""
        self.slots = np.array(block_table, np.int64)
        self.content = content_of(self.request_id, hashes, len(self.slots))
        self.first_written = first_written


class ShadowDataPlane:
    """Contents of both tiers. Methods raise `InvariantError` with the step for an error of the manager."""

    def __init__(self, num_device_blocks: int, num_host_blocks: int) -> None:
        self._device: Contents = np.zeros((num_device_blocks, WORDS), np.uint64)
        self._contents = {
            CacheLevel.DEVICE: self._device,
            CacheLevel.HOST: np.zeros((num_host_blocks, WORDS), np.uint64),
        }
        self._users = np.zeros(num_device_blocks, np.int64)
        """Running requests with the slot in their table."""
        self._running: dict[str, ShadowRequest] = {}
        self._tables: dict[str, Slots] = {}
        self._next_step: int | None = None
        self.num_checked_blocks = 0

    def run_step(self, step: SwapStep, members: Sequence[ShadowRequest]) -> None:
        """Apply `step`, then one forward pass of `members` (in any order: they run together)."""
        if self._next_step is not None and step.step != self._next_step:
            raise InvariantError(f"swap step {step.step} was handed out where {self._next_step} was due")
        self._next_step = step.step + 1
        for copies in step.transfers:
            self._copy(step, copies)
        for member in members:
            self._check_content(step, member, member.first_written)
        self._forward(step, members)
        for request in self._running.values():
            self._check_content(step, request, len(request.slots))

    def finish(self, request_id: str) -> None:
        del self._running[request_id]
        self._users[self._tables.pop(request_id)] -= 1

    def _copy(self, step: SwapStep, copies: BlockCopies) -> None:
        source, target = self._contents[copies.source], self._contents[copies.target]
        name = f"step {step.step}, {copies.source.value} to {copies.target.value}"
        sources, targets = np.array(copies.source_slots), np.array(copies.target_slots)
        for tier, slots in ((source, sources), (target, targets)):
            if slots.min() < 0 or slots.max() >= len(tier):
                raise InvariantError(f"{name}: slot out of range 0..{len(tier) - 1}")
        if len(np.unique(targets)) != len(targets):
            raise InvariantError(f"{name}: two copies into one slot")
        if not np.all(np.any(source[sources], axis=1)):
            raise InvariantError(f"{name}: reads a slot that was never written")
        if copies.target is CacheLevel.DEVICE and np.any(self._users[targets]):
            raise InvariantError(f"{name}: writes a slot that a running request uses")
        target[targets] = source[sources]

    def _forward(self, step: SwapStep, members: Sequence[ShadowRequest]) -> None:
        for member in members:
            if len(np.unique(member.slots)) != len(member.slots):
                raise InvariantError(f"step {step.step}: block table of {member.request_id} names a slot twice")
            if member.request_id in self._tables:
                self._users[self._tables[member.request_id]] -= 1
            self._users[member.slots] += 1
            self._tables[member.request_id] = member.slots
            self._running[member.request_id] = member
        for member in members:
            written = member.slots[member.first_written :]
            if np.any(self._users[written] != 1):
                raise InvariantError(f"step {step.step}: {member.request_id} writes a slot that another request uses")
            self._device[written] = member.content[member.first_written :]

    def _check_content(self, step: SwapStep, request: ShadowRequest, num_blocks: int) -> None:
        wrong = np.any(self._device[request.slots[:num_blocks]] != request.content[:num_blocks], axis=1)
        self.num_checked_blocks += num_blocks
        if np.any(wrong):
            index = int(np.argmax(wrong))
            raise InvariantError(
                f"step {step.step}: block {index} of {request.request_id}, device slot {request.slots[index]}, "
                f"holds the KV of another block ({int(wrong.sum())} blocks wrong)"
            )
