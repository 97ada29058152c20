"""ReuseRates: the chance that a block is used again soon, given how often it was used and how long ago.

A block's worth is the most that keeping it can earn per unit of time: over all horizons, the best ratio of the chance
to be used within it to the expected time until then. That is the Gittins index of a job whose service is the wait for
the next use (J. C. Gittins, Bandit processes and dynamic allocation indices, J. Royal Statistical Society B 41(2),
1979); with the one horizon at which blocks are evicted it would be the "hit density" of LHD (N. Beckmann, H. Chen,
A. Cidon, LHD: improving cache hit rate by maximizing hit density, NSDI 2018).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt

MOST_USES = 8
CLASSES = tuple(uses.bit_length() for uses in range(MOST_USES + 1))
"""By uses: none since it was computed, 1, 2 or 3, 4 to 7, more."""
NUM_CLASSES = CLASSES[-1] + 1
NUM_AGES = 41
"""By age in requests: below 8, then two in each octave."""
DECAY = 0.98
"""Per refresh: what was seen 50 refreshes ago counts a third."""

RIPE = 0.5
"""Of the most that a block is ever worth; a smaller difference is noise."""

Table = list[list[float]]

YOUNG_BITS = 6
"""Of the square of an age below 8."""


def age_classes(young_bits: int) -> tuple[int, ...]:
    """By the number of bits of the square of an age, which is one more where the age is half an octave higher."""
    return tuple(min(max(0, bits - young_bits), NUM_AGES - 1) for bits in range(129))


def age_widths(young_bits: int) -> tuple[int, ...]:
    """Requests that pass in each class of ages."""
    ends = [isqrt((1 << young_bits + age_class) - 1) + 1 for age_class in range(NUM_AGES)]
    return tuple(end - begin for begin, end in zip((0, *ends[:-1]), ends, strict=True))


AGE_CLASSES = age_classes(YOUNG_BITS)
AGE_WIDTHS = age_widths(YOUNG_BITS)


class ReuseRates:
    """What was used again and what could have been, in blocks, by class and age; forgotten little by little."""

    def __init__(self) -> None:
        self._used = table()
        self._exposed = table()

    def used_again(self, use_class: int, age: int, num_blocks: int) -> None:
        self._used[use_class][AGE_CLASSES[(age * age).bit_length()]] += num_blocks

    def exposed(self, age: int, num_blocks: Sequence[float], num_requests: int) -> None:
        """So many blocks of that age, by class, could have been used by each of `num_requests`."""
        age_class = AGE_CLASSES[(age * age).bit_length()]
        for exposed, count in zip(self._exposed, num_blocks, strict=True):
            exposed[age_class] += num_requests * count

    def fade(self) -> None:
        """What was seen counts less from now on."""
        for row in (*self._used, *self._exposed):
            row[:] = [DECAY * value for value in row]

    def learned(self, doubt: float) -> tuple[Table, Sequence[int]]:
        """What a block is worth, by class and `AGE_CLASSES`, 0 while nothing is known; and classes whose blocks are
        worth more when they are older: they come back after a while, not at once. To the evidence of each class,
        `doubt` blocks used again at the rate of all classes are added.
        """
        worths, shared = [], self._shared_rates()
        for used, exposed in zip(self._used, self._exposed, strict=True):
            rates = [
                (uses + doubt) / (chances + doubt / rate) if rate else 0.0
                for uses, chances, rate in zip(used, exposed, shared, strict=True)
            ]
            worths.append(_best_ratios(rates))
        return worths, [use_class for use_class, row in enumerate(worths) if row[0] < RIPE * max(row)]

    def _shared_rates(self) -> list[float]:
        """Uses per block and request, of all classes together. Where none was seen, half of the rate at the age before:
        as rare as evidence can be there.
        """
        rates, rate = list[float](), 0.0
        for uses, chances in zip(_totals(self._used), _totals(self._exposed), strict=True):
            rate = uses / chances if uses and chances else rate / 2
            rates.append(rate)
        return rates


def table() -> Table:
    return [[0.0] * NUM_AGES for _ in range(NUM_CLASSES)]


def _totals(table: Table) -> list[float]:
    return [sum(column) for column in zip(*table, strict=True)]


def _best_ratios(rates: Sequence[float]) -> list[float]:
    """By age: the best ratio, over all horizons, of the chance of a use to the expected wait.

    Both add up from age to age, so a horizon's ratio is the slope between two points of one curve, and the best one the
    slope of its upper hull.
    """
    points, unused, wait = [(0.0, 0.0)], 1.0, 0.0
    for rate, width in zip(rates, AGE_WIDTHS, strict=True):
        left = unused / (1.0 + rate * width)
        wait += width * (unused + left) / 2
        unused = left
        points.append((wait, 1.0 - unused))
    hull, best = [points.pop()], []
    for point in reversed(points):
        slope = _slope(point, hull[-1])
        while len(hull) > 1 and slope <= (further := _slope(point, hull[-2])):
            hull.pop()
            slope = further
        best.append(slope)
        hull.append(point)
    return best[::-1]


def _slope(point: tuple[float, float], other: tuple[float, float]) -> float:
    wait = other[0] - point[0]
    return (other[1] - point[1]) / wait if wait > 0 else 0.0  # nobody waits any more: everything was used
