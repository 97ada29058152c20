"""BatchRequest: what a worker rank does in one step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .messages import SwapStep

__all__ = ["BatchRequest"]


@dataclass
class BatchRequest:
    """Run `swap_steps`, one after another, do what `transfers` say, then compute `requests`. Not thread-safe.

    Swap steps stay separate, in step order: merging the copies of two steps would let a later step's eviction read a
    slot before the earlier step's swap-in filled it.
    """

    requests: list[Any] = field(default_factory=list)
    swap_steps: list[SwapStep] = field(default_factory=list)
    transfers: list[Any] = field(default_factory=list)
    """For the transfer desks of the rank: see `transfer/rank_messages.py`."""

    def __bool__(self) -> bool:
        return bool(self.requests or self.swap_steps or self.transfers)
