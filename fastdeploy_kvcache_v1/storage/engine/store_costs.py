"""StoreCosts: is a stored prefix there sooner than it is computed?"""

from __future__ import annotations

from collections.abc import Callable

from ...scheduler.costs import FEWEST_TOKENS, TwoTermFit

PIECE_BLOCKS = 32
"""Loaded as one: what has arrived when a request starts is used, in such pieces."""

KEPT_SHARE = 0.8
"""Of what questions took before, at each answer that took longer."""

MOST_SURPRISE = 4.0
"""A piece that takes more times what was expected was held up by something else, and counts as so many times. A store
that has become slow is known after a few pieces all the same.
"""

PROBE_EVERY = 32
"""Where nothing is worth loading, something is loaded every so often, to learn when that changes."""

ComputeSeconds = Callable[[int, int], float | None]
"""What computing tokens `[start, end)` of a prompt takes: `PrefillCosts.seconds`."""


class StoreCosts:
    """A request waits for the question and for its pieces, behind those that were begun before. It computes after that:
    so waiting is right as long as it takes no longer than what it saves, and as long as either is not known. Nothing is
    said for a part of the stored blocks: the later ones of a prompt cost most to compute, so it is all or none.

    Not thread-safe.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._loads = TwoTermFit()
        """A piece costs something in itself and something for each of its blocks."""
        self._num_declined = 0
        """Times in a row that nothing was worth waiting for."""
        self._question_s: float | None = None
        self._num_unweighed = 0
        """Requests so far of which nobody knows what they save."""
        self.compute_s: ComputeSeconds = lambda start, end: None

    def asked(self, seconds: float) -> None:
        """A question was answered well. An answer that was fast is believed at once."""
        before_s = seconds if self._question_s is None else min(seconds, self._question_s)
        self._question_s = KEPT_SHARE * before_s + (1 - KEPT_SHARE) * seconds

    def loaded(self, num_blocks: int, seconds: float) -> None:
        """A piece has arrived as a whole, on every rank."""
        if num_blocks <= 0 or seconds <= 0:
            return
        if self._loads.is_known:
            expected_s = self._loads.value(num_blocks, 1.0)
            if self._num_declined and seconds < expected_s:
                self._loads = TwoTermFit()  # the next trial is far away: one that was fast is believed at once
            seconds = min(seconds, MOST_SURPRISE * expected_s)
        self._loads.measured(num_blocks, 1.0, seconds)

    def is_worth_waiting(self, begin: int, end: int, *, num_ahead: int, has_asked: bool) -> bool:
        """For blocks `[begin, end)` of a prompt, behind `num_ahead` blocks for others?"""
        saved_s = self.compute_s(begin * self._block_size, end * self._block_size)
        if saved_s is None or not self._loads.is_known:
            return True
        question_s = 0.0 if has_asked else self._question_s or 0.0
        pieces = -(-(end - begin) // PIECE_BLOCKS) - (-num_ahead // PIECE_BLOCKS)
        return question_s + self._loads.value(end - begin + num_ahead, pieces) <= saved_s

    def blocks_to_compute(self, begin: int, end: int, num_tokens: int) -> int:
        """Of the stored blocks `[begin, end)` of a prompt of `num_tokens` tokens: how many of the last ones are to be
        computed, to learn what that costs. Mostly 0, and always once it is known: but where whole prompts are stored,
        what is left of them is too short to tell.
        """
        if self.compute_s(0, self._block_size) is not None:
            return 0
        self._num_unweighed += 1
        if self._num_unweighed % PROBE_EVERY:
            return 0
        num_missing = FEWEST_TOKENS - (num_tokens - end * self._block_size)
        return min(end - begin, max(0, -(-num_missing // self._block_size)))

    def waits(self) -> None:
        """A request waits because that is worth it."""
        self._num_declined = 0

    def declined(self) -> bool:
        """One does not wait. Returns True now and then: it should all the same, for a piece."""
        self._num_declined += 1
        return self._num_declined % PROBE_EVERY == 0

    def not_tried(self) -> None:
        """Nothing was stored of the prompt for which `declined` was True: the next one is tried."""
        self._num_declined -= 1
