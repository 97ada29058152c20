"""ReuseRates: the chance that something comes back soon, given its class and how long ago it was used last.

Its worth is the most that keeping it can earn per unit of time. Over all horizons, it is the best ratio of the
chance of a use within the horizon to the expected wait. That is the Gittins index of a job whose service is the wait
for the next use (J. C. Gittins, Bandit processes and dynamic allocation indices, J. Royal Statistical Society B 41(2),
1979). With one horizon, the age at eviction, it would be the "hit density" of LHD (N. Beckmann, H. Chen, A. Cidon, LHD:
improving cache hit rate by maximizing hit density, NSDI 2018).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import isqrt

NUM_AGES = 32
"""Classes of ages: below 1,024 ticks, then two per octave, up to nine hours."""
DECAY = 0.995
"""Per refresh: observations of 200 refreshes ago count a third."""
MOST_UNIT = 1e9

Table = list[list[float]]
"""Numbers by class, then by class of age."""

YOUNG_BITS = 20
"""Bits of the square of an age below 1,024 ticks."""


AGE_CLASSES = tuple(min(max(0, bits - YOUNG_BITS), NUM_AGES - 1) for bits in range(129))
"""Class of an age by the number of bits of its square, which grows by one with each half octave."""

_ENDS = [0, *(isqrt((1 << YOUNG_BITS + age_class) - 1) + 1 for age_class in range(NUM_AGES))]
AGE_WIDTHS = tuple(end - begin for begin, end in pairwise(_ENDS))
"""Number of ages in each class."""


class ReuseRates:
    """Things that came back, and things that could have, by class and age, with exponential forgetting.

    Classes are of several kinds: `kinds` has the number of classes of each. A class that is not known well is like the
    others of its kind.
    """

    def __init__(self, *kinds: int) -> None:
        ends = list(accumulate(kinds))
        self._kinds = [slice(end - count, end) for count, end in zip(kinds, ends, strict=True)]
        self._used = worthless(ends[-1])
        self._exposed = worthless(ends[-1])
        self._unit = 1.0
        """Weight of an observation. It grows, so earlier ones count less."""
        self._rates = worthless(ends[-1])
        self.predicted = [0.0] * ends[-1]
        """Uses that the learned rates predicted, by class."""

    def used_again(self, number: int, age: int, weight: float) -> None:
        self._used[number][AGE_CLASSES[(age * age).bit_length()]] += weight * self._unit

    def exposed(self, age: int, weights: Sequence[float], ticks: int) -> None:
        """Record that things of that age, weighted by class, could have been used during `ticks`."""
        age_class = AGE_CLASSES[(age * age).bit_length()]
        for number, (weight, exposed) in enumerate(zip(weights, self._exposed, strict=False)):
            if weight:
                chances = ticks * weight
                exposed[age_class] += chances * self._unit
                self.predicted[number] += chances * self._rates[number][age_class]

    def is_rare(self, number: int, kind: int) -> bool:
        """True if a class is used less than an eighth as often as the others of its kind, as far as is known."""
        uses, chances = sum(self._used[number]), sum(self._exposed[number])
        all_uses, all_chances = (sum(map(sum, table[self._kinds[kind]])) for table in (self._used, self._exposed))
        return 8 * uses * (all_chances - chances) <= (all_uses - uses) * chances

    def fade(self) -> None:
        self._unit /= DECAY
        if self._unit > MOST_UNIT:
            for row in (*self._used, *self._exposed):
                row[:] = [value / self._unit for value in row]
            self._unit = 1.0

    def learned(self, *doubts: float) -> Table:
        """Return the worth of each class by age. It is 0 while nothing is known. Each class has a prior: a weight of
        the doubt of its kind, used at the common rate of the kind.
        """
        self._rates = []
        for kind, doubt in zip(self._kinds, (doubt * self._unit for doubt in doubts), strict=True):
            used, exposed = self._used[kind], self._exposed[kind]
            shared = _shared_rates(used, exposed)
            self._rates += [
                [
                    (uses + doubt) / (chances + doubt / rate) if rate else 0.0
                    for uses, chances, rate in zip(*rows, shared, strict=True)
                ]
                for rows in zip(used, exposed, strict=True)
            ]
        return [_best_ratios(rates) for rates in self._rates]


def _shared_rates(used: Table, exposed: Table) -> list[float]:
    """Return uses per tick of all classes. Without data at an age: half the rate of the age before."""
    rates, rate = list[float](), 0.0
    for uses, chances in zip(*(map(sum, zip(*table, strict=True)) for table in (used, exposed)), strict=True):
        rate = uses / chances if uses and chances else rate / 2
        rates.append(rate)
    return rates


def worthless(num_classes: int) -> Table:
    """Make a table of zeros."""
    return [[0.0] * NUM_AGES for _ in range(num_classes)]


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
