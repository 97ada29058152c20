"""LoadCosts: how much of a prefix that is on the host is worth loading, and what is computed sooner.

A batch loads and computes at the same time: layer by layer, its compute waits for what its swap-ins have not brought
yet. So it takes as long as the longer of the two. Loading everything is right as long as that ends no later than
computing everything would. Where it would end later, as many blocks are loaded as arrive while the others are computed:
that is sooner than either, and it goes on measuring the copies, so a tier that was slow for a moment is soon trusted
again.
"""

from __future__ import annotations

from .two_term_fit import TwoTermFit

FEWEST_TOKENS = 64
"""Of a step that says something about the cost of a token: what a step costs anyway weighs less in larger ones."""

PROBE_EVERY = 32
"""Where not even one block is worth loading, one is loaded every so often, to learn when that changes."""


def positions(start: int, end: int) -> float:
    """What attention costs more behind a longer context: tokens `[start, end)` times the tokens before them."""
    return (end * end - start * start) / 2


class LoadCosts:
    """Measured: a copy costs something in itself and something per token, computing something per token and per token
    before it. Until both are known everything is loaded. Not thread-safe.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._copies, self._compute = TwoTermFit(), TwoTermFit()
        self._num_declined = 0
        """Times in a row that nothing was worth loading."""

    def copied(self, num_tokens: int, seconds: float) -> None:
        """A swap-in brought `num_tokens` tokens."""
        if self._num_declined and self._copies.is_known and seconds < self._copy_s(num_tokens):
            self._copies = TwoTermFit()  # the next probe is far away: one that was fast is believed at once
        if num_tokens > 0 and seconds > 0:
            self._copies.measured(num_tokens, 1.0, seconds)

    def computed(self, num_tokens: int, num_positions: float, seconds: float) -> None:
        """A step computed `num_tokens` prompt tokens, with so many `positions`, and did not wait for copies in these
        `seconds`.
        """
        if num_tokens >= FEWEST_TOKENS and seconds > 0:
            self._compute.measured(num_tokens, num_positions, seconds)

    def blocks_to_load(
        self, num_blocks: int, start: int, end: int, *, budget: int, num_planned: int = 0, num_loading: int = 0
    ) -> int:
        """How many of its `num_blocks` host blocks a request should load, from the first one on. It computes the
        others, and what is behind them up to token `end`; its tokens before `start` are on the device.

        The batch computes `num_planned` tokens and loads `num_loading` tokens for others, and may compute `budget`
        tokens more: what a request computes in later batches comes too late to hide a copy. O(log blocks).
        """
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
        return self._probe(fewest)

    def _copy_s(self, num_tokens: int) -> float:
        return self._copies.value(num_tokens, 1.0)

    def _compute_s(self, start: int, end: int) -> float:
        return self._compute.value(end - start, positions(start, end))

    def _probe(self, num_blocks: int) -> int:
        if num_blocks:
            self._num_declined = 0
            return num_blocks
        self._num_declined += 1
        return int(self._num_declined % PROBE_EVERY == 0)
