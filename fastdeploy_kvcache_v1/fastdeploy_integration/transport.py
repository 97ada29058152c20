"""How swap steps travel from the host's scheduler to its workers: as an attribute of the first task of a batch.

The host rebuilds its task lists on the way, but task objects survive, pickled once. The attribute is made of plain
tuples and integers, because the host's queue server unpickles it too. Every message names the one before it, so a batch
that the host dropped on the way is an error in the worker and never a block that was not copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..batch_request import SWAP_ATTRIBUTE
from ..errors import TransferError
from ..metadata import CacheLevel, CacheSwapMetadata, SwapStep

RESTART = -1
"""Stands for the message before the first one, and the first one after the cache was reset."""

Wire = tuple[int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Step, previous step or RESTART, evicted device slots, their host slots, swapped-in host slots, their device slots."""


class SwapOutbox:
    """The scheduler's end. Not thread-safe: the schedule loop owns it."""

    def __init__(self) -> None:
        self._previous = RESTART
        self._carrier: Any = None

    def attach(self, tasks: Sequence[Any], step: SwapStep) -> None:
        """Let `step` ride on the first of `tasks` (at least one, if `step` is not empty)."""
        self.clear()
        if step:
            wire = encode(step, self._previous)
            self._carrier, self._previous = tasks[0], step.step
            setattr(tasks[0], SWAP_ATTRIBUTE, wire)

    @property
    def is_loaded(self) -> bool:
        """A message is on its way on the last batch."""
        return self._carrier is not None

    def clear(self) -> None:
        """The last batch has been sent: the host uses one object for every chunk of a request, so take ours off it."""
        if self._carrier is not None:
            vars(self._carrier).pop(SWAP_ATTRIBUTE, None)
            self._carrier = None

    def restart(self) -> None:
        """Earlier messages no longer matter, sent or lost."""
        self._previous = RESTART


class SwapInbox:
    """A worker's end."""

    def __init__(self) -> None:
        self._last = RESTART

    def take(self, tasks: Iterable[Any]) -> list[SwapStep]:
        """The steps that ride on `tasks`, in order, taken off them. Raises `TransferError` when one before was lost."""
        steps = []
        for task in tasks:
            wire: Wire | None = vars(task).pop(SWAP_ATTRIBUTE, None)
            if wire is None:
                continue
            step, previous = decode(wire)
            if previous not in (self._last, RESTART):
                raise TransferError(
                    f"swap step {step.step} follows step {previous}, but the last one that arrived is {self._last}: "
                    "a batch was lost between scheduler and worker, cached blocks cannot be trusted"
                )
            self._last = step.step
            steps.append(step)
        return steps


def encode(step: SwapStep, previous: int) -> Wire:
    evict, swap_in = step.evict, step.swap_in
    return step.step, previous, evict.source_slots, evict.target_slots, swap_in.source_slots, swap_in.target_slots


def decode(wire: Wire) -> tuple[SwapStep, int]:
    number, previous, evicted, saved, loaded, filled = wire
    evict = CacheSwapMetadata(CacheLevel.DEVICE, CacheLevel.HOST, evicted, saved)
    return SwapStep(number, evict, CacheSwapMetadata(CacheLevel.HOST, CacheLevel.DEVICE, loaded, filled)), previous
