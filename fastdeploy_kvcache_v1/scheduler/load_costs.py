"""LoadCosts: how much of a prefix that is on the host is worth loading, and what is computed sooner.

A batch loads and computes at the same time: layer by layer, its compute waits for what its swap-ins have not brought
yet. So it takes as long as the longer of the two. Loading everything is right as long as that ends no later than
computing everything would. Where it would end later, as many blocks are loaded as arrive while the others are computed:
that is sooner than either, and it goes on measuring the copies, so a tier that was slow for a moment is soon trusted
again.
"""

from __future__ import annotations

from ..metadata import CacheLevel
from ..timings import LoadTime, PrefillTime, positions
from .link_costs import LinkCosts
from .slowest_fit import SlowestFit

FEWEST_TOKENS = 64
"""Of a step that says something about the cost of a token: what a step costs anyway weighs less in larger ones."""


class LoadCosts:
    """Measured: a copy costs something in itself and something per token, computing something per token and per token
    before it. Until both are known everything is loaded. A batch waits for the slowest rank in both, so each rank's
    times are kept apart, and those of the slowest count. Not thread-safe.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._copies, self._compute = LinkCosts(), SlowestFit()

    def loaded(self, load: LoadTime, rank: int = 0) -> None:
        """A swap-in ended well on `rank`, or on all ranks if all of their times are told as those of one."""
        self._copies.measured(load.num_blocks * self._block_size, load.seconds, rank)

    def computed(self, prefill: PrefillTime, rank: int = 0) -> None:
        """A forward pass ended, likewise. One that computed few tokens says nothing."""
        if prefill.num_tokens >= FEWEST_TOKENS and prefill.seconds > 0:
            self._compute.measured(rank, *prefill)

    def blocks_to_load(
        self, num_blocks: int, start: int, end: int, *, budget: int, num_planned: int = 0, num_loading: int = 0
    ) -> int:
        """How many of its `num_blocks` host blocks a request should load, from the first one on. It computes the
        others, and what is behind them up to token `end`; its tokens before `start` are on the device.

        The batch computes `num_planned` tokens and loads `num_loading` tokens for others, and may compute `budget`
        tokens more: what a request computes in later batches comes too late to hide a copy. Now and then, where none
        is worth it, it is one all the same. O(log blocks).
        """
        if not num_blocks:
            return 0
        worth = self.blocks_worth_loading(
            num_blocks, start, end, budget=budget, num_planned=num_planned, num_loading=num_loading
        )
        if worth:
            self._copies.paid()
            return worth
        return int(self._copies.declined())

    def blocks_worth_loading(
        self, num_blocks: int, start: int, end: int, *, budget: int, num_planned: int = 0, num_loading: int = 0
    ) -> int:
        """As `blocks_to_load`, a look: without the load now and then that is worth nothing in itself."""
        if not num_blocks or not self._copies.is_known or not self._compute.is_known:
            return num_blocks
        planned_s = self._compute.value(num_planned, 0.0)

        def is_hidden(count: int) -> bool:
            first = start + count * self._block_size
            in_this_batch = self._compute_s(first, min(end, first + budget))
            return self._copy_s(num_loading + count * self._block_size) <= planned_s + in_this_batch

        behind = start + num_blocks * self._block_size
        beside_s = planned_s + self._compute_s(behind, min(end, behind + budget))
        if self._copy_s(num_loading + behind - start) <= self._compute_s(start, behind) + beside_s:
            return num_blocks
        fewest, most = 0, num_blocks - 1
        while fewest < most:
            middle = (fewest + most + 1) // 2
            fewest, most = (middle, most) if is_hidden(middle) else (fewest, middle - 1)
        return fewest

    def seconds_saved(self, num_blocks: int, start: int, end: int, level: CacheLevel) -> float | None:
        """How much sooner the first token of a request comes, of `end` tokens, if the `num_blocks` blocks from token
        `start` on are in tier `level` than if it computes them; None until it is known what computing costs. From the
        host it loads as many of them as are worth loading.
        """
        if not self._compute.is_known:
            return None
        if level is CacheLevel.DEVICE or not self._copies.is_known:
            return self._compute_s(start, start + num_blocks * self._block_size)
        worth = self.blocks_worth_loading(num_blocks, start, end, budget=end)
        behind = start + worth * self._block_size
        beside_s = self._compute_s(behind, end)
        if worth:
            beside_s = max(beside_s, self._copy_s(behind - start))
        return self._compute_s(start, end) - beside_s

    def _copy_s(self, num_tokens: int) -> float:
        return self._copies.seconds(num_tokens)

    def _compute_s(self, start: int, end: int) -> float:
        return self._compute.value(end - start, positions(start, end))
