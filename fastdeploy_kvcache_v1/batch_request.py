"""BatchRequest: what travels from the scheduler to every worker rank for one step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from .metadata import SwapStep

SWAP_ATTRIBUTE = "_kvcache_v1_swap_steps"
"""Task attribute that carries `SwapStep`s through hosts which rebuild their task lists (lists die, tasks survive)."""


def attach_swap_steps(task: Any, steps: Iterable[SwapStep]) -> None:
    """Let `steps` ride on `task`, replacing what an earlier step left there."""
    setattr(task, SWAP_ATTRIBUTE, tuple(steps))


def detach_swap_steps(task: Any) -> tuple[SwapStep, ...]:
    """Take the steps that ride on `task` off it; () when there are none."""
    steps: tuple[SwapStep, ...] = vars(task).pop(SWAP_ATTRIBUTE, ())
    return steps


@dataclass
class BatchRequest:
    """Inference requests, control requests, and the swap steps to run before them.

    Swap steps stay separate, in step order: merging the copies of two steps would let a later step's eviction read a
    slot before the earlier step's swap-in filled it. Requests may be re-sorted and batches re-cut freely; the steps
    keep their order and appear exactly once. Not thread-safe; pickles as plain data.
    """

    requests: list[Any] = field(default_factory=list)
    controls: list[Any] = field(default_factory=list)
    swap_steps: list[SwapStep] = field(default_factory=list)

    @classmethod
    def from_tasks(cls, tasks: Iterable[Any], *, is_control: Callable[[Any], bool]) -> BatchRequest:
        """Sort `tasks` into inference and control requests and collect the swap steps that ride on any of them."""
        batch = cls()
        for task in tasks:
            batch.add_swap_steps(detach_swap_steps(task))
            (batch.controls if is_control(task) else batch.requests).append(task)
        return batch

    def append(self, request: Any) -> None:
        self.requests.append(request)

    def extend(self, other: BatchRequest) -> None:
        """Take over everything of `other`; raises `ValueError` if both carry the same step."""
        self.add_swap_steps(other.swap_steps)
        self.requests.extend(other.requests)
        self.controls.extend(other.controls)

    def add_swap_steps(self, steps: Iterable[SwapStep]) -> None:
        """Merge non-empty steps in step order; raises `ValueError`, changing nothing, for a step already present."""
        merged = sorted([*self.swap_steps, *(step for step in steps if step)], key=lambda step: step.step)
        for earlier, later in pairwise(merged):
            if earlier.step == later.step:
                raise ValueError(f"swap step {later.step} was handed over twice")
        self.swap_steps = merged

    def __len__(self) -> int:
        return len(self.requests)

    def __bool__(self) -> bool:
        return bool(self.requests or self.controls or self.swap_steps)
