"""LiveAges against a list of every use, with the error that its spans allow."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from fastdeploy_kvcache_v1.scheduler.reuse.ages import FIRST_SPAN, LiveAges


@pytest.mark.parametrize("seed", range(5))
def test_against_a_list_of_all_uses(seed: int) -> None:
    dice = random.Random(seed)
    ages, uses, end = LiveAges(2), [], 2_000 * FIRST_SPAN
    for now in range(0, end, FIRST_SPAN):
        for _ in range(dice.randint(0, 3)):
            use = (now, dice.randint(0, 1), dice.randint(1, 9))
            ages.young(now)[use[1]] += use[2]
            uses.append(use)
        while len(uses) > 1_000 or (uses and dice.random() < 0.2):
            use = uses.pop(dice.randrange(len(uses)))
            ages.remove(use[0], use[2], use[1])
            if dice.random() < 0.3:  # what was used then is of the other class now
                use = (use[0], 1 - use[1], use[2])
                ages.add(*use)
                uses.append(use)
    spans = list(ages.spans(end))
    assert len(spans) < 60
    assert spans[0][0] == 0
    assert all(old == young for (_, old, _), (young, _, _) in pairwise(spans))
    for young, old, weights in spans:
        for column in (0, 1):
            inside = sum(weight for time, each, weight in uses if each == column and young < end - time <= old)
            assert weights[column] == inside
        assert old - young <= max(16 * FIRST_SPAN, young / 2), "spans are short where ages are"
    for column in (0, 1):
        total = sum(weight for _, each, weight in uses if each == column)
        for share in (0.1, 0.5, 0.9):
            age = ages.age_of(end, column, share * total)
            younger = sum(weight for time, each, weight in uses if each == column and end - time <= age)
            assert younger == pytest.approx(share * total, rel=0.15)
        assert ages.age_of(end, column, total + 1) > end


def test_removing_blocks_that_were_never_added_keeps_weights_at_zero() -> None:
    ages = LiveAges(1, now=10)
    ages.remove(3, 5, 0)
    ages.young(12)[0] += 1
    assert sum(weights[0] for _, _, weights in ages.spans(13)) == 1
