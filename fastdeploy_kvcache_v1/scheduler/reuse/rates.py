"""ReuseRates: the chance that a block is used again soon, given how often and how long ago it was used.

A block's worth is the most that keeping it can earn per unit of time. Over all horizons, it is the best ratio of the
chance of a use within the horizon to the expected wait. That is the Gittins index of a job whose service is the wait
for the next use (J. C. Gittins, Bandit processes and dynamic allocation indices, J. Royal Statistical Society B 41(2),
1979). With one horizon, the age at eviction, it would be the "hit density" of LHD (N. Beckmann, H. Chen, A. Cidon, LHD:
improving cache hit rate by maximizing hit density, NSDI 2018).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt

MOST_USES = 8
CLASSES = tuple(uses.bit_length() for uses in range(MOST_USES + 1))
"""Use class by number of uses since the block was computed: 0, 1, 2 or 3, 4 to 7, more."""
NUM_CLASSES = CLASSES[-1] + 1
NUM_AGES = 41
"""Classes of ages, counted in requests: below 8, then two per octave."""
DECAY = 0.98
"""Per refresh: observations of 50 refreshes ago count a third."""

RIPE = 0.5
"""A class comes back late if its youngest blocks are worth less than this share of its best ones."""

Table = list[list[float]]
"""Numbers by use class, then by class of age."""

YOUNG_BITS = 6
"""Bits of the square of an age below 8."""


def age_classes(young_bits: int) -> tuple[int, ...]:
    """Class of an age by the number of bits of its square, which grows by one with each half octave."""
    return tuple(min(max(0, bits - young_bits), NUM_AGES - 1) for bits in range(129))


def age_widths(young_bits: int) -> tuple[int, ...]:
    """Number of ages in each class."""
    ends = [isqrt((1 << young_bits + age_class) - 1) + 1 for age_class in range(NUM_AGES)]
    return tuple(end - begin for begin, end in zip((0, *ends[:-1]), ends, strict=True))


AGE_CLASSES = age_classes(YOUNG_BITS)
AGE_WIDTHS = age_widths(YOUNG_BITS)


class ReuseRates:
    """Blocks that were used again, and blocks that could have been, by class and age, with exponential forgetting."""

    def __init__(self) -> None:
        self._used = table()
        self._exposed = table()

    def used_again(self, use_class: int, age: int, num_blocks: int) -> None:
        self._used[use_class][AGE_CLASSES[(age * age).bit_length()]] += num_blocks

    def exposed(self, age: int, num_blocks: Sequence[float], num_requests: int) -> None:
        """Record that each of `num_requests` could have used these blocks of that age, given by class."""
        age_class = AGE_CLASSES[(age * age).bit_length()]
        for exposed, count in zip(self._exposed, num_blocks, strict=True):
            exposed[age_class] += num_requests * count

    def fade(self) -> None:
        for row in (*self._used, *self._exposed):
            row[:] = [DECAY * value for value in row]

    def learned(self, doubt: float) -> tuple[Table, Sequence[int]]:
        """Return the worth of a block by class and age, and the classes whose blocks are worth more when older.

        The worth is 0 while nothing is known. Each class has a prior: `doubt` blocks used at the rate of all classes.
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
        """Return uses per block and request of all classes. Without data at an age: half the rate of the age before."""
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
    """Return, by age, the best ratio over all horizons of the chance of a use to the expected wait.

    Both add up from age to age. So the ratio of a horizon is the slope between two points of one curve, and the best
    ratio is the slope of its upper hull.
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
    return (other[1] - point[1]) / wait if wait > 0 else 0.0  # no wait is left: everything was used
