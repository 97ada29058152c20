"""The line of requests that wait to be admitted, in order of arrival."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import takewhile

from .generation import Generation

__all__ = ["WaitingLine"]


class WaitingLine:
    """Thousands may wait, and all their clients may go: joining and leaving are O(1). Engine thread only, but for
    `len`.
    """

    def __init__(self) -> None:
        self._by_arrival: OrderedDict[int, Generation] = OrderedDict()
        self._num_arrivals = 0

    def __len__(self) -> int:
        return len(self._by_arrival)

    def __iter__(self) -> Iterator[Generation]:
        return iter(self._by_arrival.values())

    def join(self, generation: Generation) -> None:
        """Behind all others, with its place in the order of arrival."""
        generation.arrival = self._num_arrivals
        self._num_arrivals += 1
        self._by_arrival[generation.arrival] = generation

    def put_back(self, generation: Generation) -> None:
        """To its place again. Few arrived earlier: preempted ones, and those that expect blocks."""
        earlier = list(takewhile(lambda arrival: arrival < generation.arrival, self._by_arrival))
        self._by_arrival[generation.arrival] = generation
        for arrival in (generation.arrival, *reversed(earlier)):
            self._by_arrival.move_to_end(arrival, last=False)

    def leave(self, generation: Generation) -> None:
        """Raises `KeyError` for one that does not wait."""
        del self._by_arrival[generation.arrival]
