"""LoadChoice: how much a request takes of what the cache has of it, because the rest is computed sooner than loaded."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from ...metadata import MatchResult
from ...scheduler.load_costs import LoadCosts
from ...timings import Timings
from .open_batch import OpenBatch


class LoadChoice:
    """`LoadCosts` for the batch that FastDeploy is putting together. FastDeploy keeps the tokens that are left to its
    batch to itself, so they are counted from what was told of it: without the rows that decode, one token each.

    Not thread-safe: the adapter's lock covers it.
    """

    def __init__(self, batch: OpenBatch, block_size: int, max_batched_tokens: int | None = None) -> None:
        """`max_batched_tokens`: of one batch, None for any number."""
        self._batch = batch
        self._block_size = block_size
        self._max_batched_tokens = max_batched_tokens or sys.maxsize
        self.costs = LoadCosts(block_size)

    def measured(self, timings: Mapping[int, Timings]) -> None:
        """What ranks say that copies and passes took."""
        for rank, (loads, prefills) in timings.items():
            for load in loads:
                self.costs.loaded(load, rank)
            for prefill in prefills:
                self.costs.computed(prefill, rank)

    def blocks_to_use(self, match: MatchResult, num_tokens: int) -> int:
        """Of the blocks that a request of `num_tokens` tokens matched: it loads those of them that are on the host."""
        num_on_device = match.num_blocks - match.num_host_blocks
        return num_on_device + self.costs.blocks_to_load(
            match.num_host_blocks,
            num_on_device * self._block_size,
            num_tokens,
            budget=self._budget,
            num_planned=self._batch.num_tokens,
            num_loading=self._batch.num_loading_tokens,
        )

    def blocks_worth_using(self, num_cached: int, num_on_device: int, num_tokens: int) -> int:
        """As `blocks_to_use`, a look at a request of which `num_cached` blocks are cached."""
        return num_on_device + self.costs.blocks_worth_loading(
            num_cached - num_on_device,
            num_on_device * self._block_size,
            num_tokens,
            budget=self._budget,
            num_planned=self._batch.num_tokens,
            num_loading=self._batch.num_loading_tokens,
        )

    @property
    def _budget(self) -> int:
        return max(0, self._max_batched_tokens - self._batch.num_tokens)
