"""Lookahead: blocks that waiting requests will hit are evicted last, the block needed last first.

An eviction order that only looks back can evict blocks that the next request needs. A server knows its waiting
requests, so for them Belady's rule applies: evict the block that is needed last (L. A. Belady, A study of replacement
algorithms for a virtual-storage computer, IBM Systems Journal 5(2), 1966).
"""

from __future__ import annotations

from collections.abc import Sequence

from ..contract.messages import BlockHashes
from .radix_tree import RadixTree
from .residency import Residency

MOST_RUNS = 256
"""Runs examined in one step, about 0.2 ms."""


class Lookahead:
    """Looks at the waiting requests when a tier first runs short in a step. A step without eviction costs nothing."""

    def __init__(self, tree: RadixTree, residency: Residency, most_requests: int) -> None:
        self._tree = tree
        self._residency = residency
        self._most_requests = most_requests
        self._line: Sequence[BlockHashes] | None = ()
        """None after `look`, until the next `expect`."""

    def expect(self, line: Sequence[BlockHashes]) -> None:
        """Set the waiting requests, the next one first. Only the first `most_requests` are kept."""
        self._line = line[: self._most_requests]

    def look(self) -> None:
        """Protect the blocks that waiting requests will hit. O(runs touched), once per `expect`."""
        line, self._line = self._line, None
        if line is None:
            return
        paths, num_runs = [], 0
        for sequence in line:
            path = [run for run, _ in self._tree.look(sequence.hashes)] if sequence.access.reads else []
            num_runs += len(path)
            if num_runs > MOST_RUNS:
                break
            paths.append(path)
        self._residency.expect(paths)
