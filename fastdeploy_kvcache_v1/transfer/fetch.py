"""Fetch: one request's blocks on their way, and how far each prefill rank's part of them is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ..errors import RemoteReadError
from ..worker.runtime.cpu import CpuEvent
from .control_link import ControlLink
from .messages import Offer
from .spans import Chunk

__all__ = ["Fetch", "FetchResult", "Part"]


class FetchResult(NamedTuple):
    """What became of one fetch, reported once."""

    request_id: str
    num_bytes: int
    """That arrived."""
    seconds: float
    """From the call of `fetch`."""
    failed_slots: tuple[int, ...] = ()
    """Slots that hold no valid data: all of the fetch, or none."""
    error: str | None = None


@dataclass(eq=False)
class Part:
    """An offer of one prefill rank. It may be here before its fetch."""

    link: ControlLink
    offer: Offer
    num_layers: int
    end_block: int = 0
    """Blocks before it have been told readable, those of the last chunk in layers before `end_layer`."""
    first_of_chunk: int = 0
    end_layer: int = 0
    told: list[Chunk] = field(default_factory=list)
    """Readable, and not asked for yet."""
    num_open_reads: int = 0
    is_done: bool = False
    """`Done` was sent."""
    is_settled: bool = False

    def advance(self, end_block: int, end_layer: int) -> None:
        """What a `Progress` adds. Raises `RemoteReadError` for one that cannot follow the last."""
        fits = end_block <= len(self.offer.slots) and 0 < end_layer <= self.num_layers
        if end_block > self.end_block and self.end_layer in (0, self.num_layers):
            self.first_of_chunk, self.end_block, self.end_layer = self.end_block, end_block, 0
        if not fits or end_block != self.end_block or end_layer <= self.end_layer:
            raise RemoteReadError(
                f"the prefill server says that {end_block} blocks are there in {end_layer} layers, after "
                f"{self.end_block} blocks in {self.end_layer} of {self.num_layers} layers, of {len(self.offer.slots)}"
            )
        self.told.append(Chunk(self.first_of_chunk, end_block, self.end_layer, end_layer))
        self.end_layer = end_layer

    def has_told(self, end_block: int) -> bool:
        """Whether all layers of the blocks before `end_block` were told readable."""
        complete = self.end_block if self.end_layer == self.num_layers else self.first_of_chunk
        return complete >= end_block


@dataclass(eq=False)
class Fetch:
    """Slots that are being filled. `event` is the use of them in the slot table."""

    request_id: str
    slots: tuple[int, ...]
    first_block: int
    """The prompt's blocks from here on go to `slots`."""
    after_step: int
    begun_at: float
    last_news: float
    event: CpuEvent = field(default_factory=CpuEvent)
    may_write: bool = False
    """The earlier uses of the slots have ended, and the slot table knows of this one."""
    ranks: list[int] | None = None
    """Prefill ranks to read from; None before the first offer."""
    num_bytes: int = 0

    @property
    def end_block(self) -> int:
        return self.first_block + len(self.slots)

    def part_of(self, chunk: Chunk) -> Chunk | None:
        """`chunk` counted from `first_block`, as far as it is wanted; None for nothing."""
        first, end = max(chunk.first_block, self.first_block), min(chunk.end_block, self.end_block)
        if first >= end:
            return None
        return Chunk(first - self.first_block, end - self.first_block, chunk.first_layer, chunk.end_layer)
