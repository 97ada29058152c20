"""Lookahead: what the next requests will hit leaves a tier last, the farthest need first.

A server knows its waiting line; an eviction order that looks back only throws out what the head of the line is about
to use. Belady's rule, as far as the line reaches: evict what is needed last (L. A. Belady, A study of replacement
algorithms for a virtual-storage computer, IBM Systems Journal 5(2), 1966).
"""

from __future__ import annotations

from collections.abc import Sequence

from ..contract.messages import BlockHashes
from .radix_tree import RadixTree
from .residency import Residency

MOST_RUNS = 256
"""Looked at in one step, some 0.2 ms of work."""


class Lookahead:
    """The line is looked at when a tier first runs short after it was told, so a step without eviction pays nothing."""

    def __init__(self, tree: RadixTree, residency: Residency, most_requests: int) -> None:
        self._tree = tree
        self._residency = residency
        self._most_requests = most_requests
        self._line: Sequence[BlockHashes] | None = ()
        """None in a step that has looked at it."""

    def expect(self, line: Sequence[BlockHashes]) -> None:
        """These requests come next, in this order; in a step of which nothing is told, none."""
        self._line = line[: self._most_requests]

    def look(self) -> None:
        """A tier is short. O(runs touched), once per `expect`."""
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
