"""LinkCosts: what it takes to bring blocks over a link, as measured, and when to try one that does not pay."""

from __future__ import annotations

from .slowest_fit import SlowestFit

MOST_SURPRISE = 4.0
"""A transfer that takes more times what was expected was held up by something else, and counts as so many times. A link
that has become slow is known after a few transfers all the same.
"""

PROBE_EVERY = 32
"""Where nothing is worth bringing, something is brought every so often, to learn when that changes."""


class LinkCosts:
    """A transfer costs something in itself and something for each of its units: tokens, blocks. Where ranks measure,
    each has a part of it to bring, and it is there when the slowest has. Not thread-safe.
    """

    def __init__(self) -> None:
        self._fit = SlowestFit()
        self._num_declined = 0
        """Times in a row that nothing was worth bringing."""

    @property
    def is_known(self) -> bool:
        """Anything was measured."""
        return self._fit.is_known

    def measured(self, num_units: float, seconds: float, rank: int = 0) -> None:
        """A transfer ended well on `rank`."""
        if num_units <= 0 or seconds <= 0:
            return
        expected_s = self._fit.value_of(rank, num_units, 1.0)
        if expected_s is not None:
            if self._num_declined and seconds < expected_s:
                self._fit.forget(rank)  # the next probe is far away: one that was fast is believed at once
            seconds = min(seconds, MOST_SURPRISE * expected_s)
        self._fit.measured(rank, num_units, 1.0, seconds)

    def seconds(self, num_units: float, num_transfers: int = 1) -> float:
        """What so many units take, in so many transfers one after the other."""
        return self._fit.value(num_units, num_transfers)

    def paid(self) -> None:
        """Something is worth bringing."""
        self._num_declined = 0

    def declined(self) -> bool:
        """Nothing is. Returns True now and then: bring something all the same."""
        self._num_declined += 1
        return self._num_declined % PROBE_EVERY == 0

    def not_tried(self) -> None:
        """There was nothing to bring after the last `declined`, which was True: the next one is, too."""
        self._num_declined -= 1
