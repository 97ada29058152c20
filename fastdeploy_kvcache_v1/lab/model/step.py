"""One step of the model: its tasks, the slices of a pass, and the result. Plain picklable data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ...contract.messages import DeviceSlot, WorkerReport

if TYPE_CHECKING:
    from .sampler import SamplingParams
    from .vision import PlacedImage

Logits = NDArray[np.float32]
"""`[rows, vocab]`"""


@dataclass(frozen=True)
class SequenceSlice:
    """Tokens of a sequence that one pass computes."""

    token_ids: NDArray[np.int64]
    """`[n]`, n >= 1. Placeholders of images are replaced by numbers for their content."""
    start: int
    """Position of the first token. The KV of all earlier positions is in the cache."""
    block_table: Sequence[int]
    """Cache blocks of the sequence in order, covering at least `start + n` tokens."""
    needs_logits: bool = True
    """Compute the logits after the last token."""
    num_drafts: int = 0
    """Number of guesses at the end. Logits are computed after each of them and after the token before."""

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def num_logits(self) -> int:
        return self.num_drafts + 1 if self.needs_logits else 0

    def check(self, *, max_position: int, num_blocks: int, block_size: int) -> None:
        """Raises `ValueError` if it does not fit the model, its block table or the cache."""
        table = self.block_table
        if len(self.token_ids) < 1 or self.start < 0:
            raise ValueError(f"a slice needs at least one token and a start of at least 0, got {self}")
        if self.end > max_position:
            raise ValueError(f"position {self.end - 1} is beyond the model's {max_position}")
        if self.end > len(table) * block_size:
            raise ValueError(f"{len(table)} blocks of {block_size} do not cover {self.end} tokens")
        if min(table) < 0 or max(table) >= num_blocks:
            raise ValueError(f"block ids must be in [0, {num_blocks}), got {min(table)} to {max(table)}")


@dataclass(frozen=True)
class StepTask:
    """One request's part of a step. The worker keeps nothing between steps."""

    request_id: str
    token_ids: list[int]
    """Tokens to compute now; at least one."""
    start: int
    """Position of `token_ids[0]` in the request: tokens before it have their KV in the block table."""
    block_table: list[DeviceSlot]
    """Covers at least `start + len(token_ids)` tokens."""
    needs_logits: bool
    """The last of `token_ids` is the request's last token: sample the next one."""
    sampling: SamplingParams
    drafts: tuple[int, ...] = ()
    """Guesses of the next tokens, covered by the block table. Only with `needs_logits`."""
    images: tuple[PlacedImage, ...] = ()
    """Images with placeholders in `token_ids`."""


@dataclass(frozen=True)
class LayerComputed:
    """The worker goes on with its batch. It says so once a second at most."""


@dataclass(frozen=True)
class StepResult:
    """Answer to a batch. A request in neither `retry` nor `errors` was computed."""

    tokens: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """By request id, for tasks with `needs_logits`: the sampled token, and one for each right draft."""
    drafts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Guesses of the next tokens."""
    retry: dict[str, str] = field(default_factory=dict)
    """Reason by request id: a copy that it needs failed. Keep nothing of this step and recompute it."""
    errors: dict[str, str] = field(default_factory=dict)
    """Reason by request id: its computation raised. Do not retry."""
    report: WorkerReport = field(default_factory=WorkerReport)
