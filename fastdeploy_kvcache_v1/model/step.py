"""One step of the model: what each request needs computed, and what came of it. Plain picklable data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..metadata import DeviceSlot, TransferReport

if TYPE_CHECKING:
    from .sampler import SamplingParams
    from .vision import PlacedImage


@dataclass(frozen=True)
class StepTask:
    """Everything the worker needs to advance one request by one step; the worker keeps nothing between steps."""

    request_id: str
    token_ids: list[int]
    """Tokens to compute now; at least one."""
    start: int
    """Position of `token_ids[0]` in the request: tokens before it have their KV in the block table."""
    block_table: list[DeviceSlot]
    """Covers at least `start + len(token_ids)` tokens."""
    needs_logits: bool
    """True when the last token of `token_ids` is the request's last one: sample its successor."""
    sampling: SamplingParams
    drafts: tuple[int, ...] = ()
    """Guesses of the tokens behind `token_ids`; the block table covers them. Only with `needs_logits`."""
    next_token: int | None = None
    """What follows `token_ids` where `needs_logits` is False; a model with a draft layer asks for it."""
    images: tuple[PlacedImage, ...] = ()
    """Those that `token_ids` has placeholders of."""


@dataclass(frozen=True)
class StepResult:
    """Answer to one batch. A request of the batch that is in neither `retry` nor `errors` was computed."""

    tokens: dict[str, int] = field(default_factory=dict)
    """Sampled token by request id, for tasks with `needs_logits`."""
    accepted: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Tokens sampled behind it, one for each draft that was right."""
    drafts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Guesses of the tokens after those."""
    retry: dict[str, str] = field(default_factory=dict)
    """Reason by request id: a copy it depends on failed, nothing of this step may be kept; compute it again."""
    errors: dict[str, str] = field(default_factory=dict)
    """Reason by request id: its computation raised; do not try again."""
    report: TransferReport = field(default_factory=TransferReport)
