"""LiveAges against a list of every use, with the error that its spans allow."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from fastdeploy_kvcache_v1.scheduler.reuse.ages import LiveAges


@pytest.mark.parametrize("seed", range(5))
def test_against_a_list_of_all_uses(seed: int) -> None:
    dice = random.Random(seed)
    ages, uses = LiveAges(2), []
    for now in range(2_000):
        for _ in range(dice.randint(0, 3)):
            use = (now, dice.randint(0, 1), dice.randint(1, 9))
            ages.young(now)[use[1]] += use[2]
            uses.append(use)
        while len(uses) > 1_000 or (uses and dice.random() < 0.2):
            ages.remove(*uses.pop(dice.randrange(len(uses))))
    end = 2_000
    spans = list(ages.spans(end))
    assert len(spans) < 60
    assert spans[0][0] == 0
    assert all(old == young for (_, old, _), (young, _, _) in pairwise(spans))
    for young, old, weights in spans:
        for use_class in (0, 1):
            inside = sum(weight for time, each, weight in uses if each == use_class and young < end - time <= old)
            assert weights[use_class] == inside
        assert old - young <= max(64, young / 4), "spans are short where ages are"
    total = sum(weight for _, _, weight in uses)
    for share in (0.1, 0.5, 0.9):
        age = ages.age_of(end, share * total)
        younger = sum(weight for time, _, weight in uses if end - time <= age)
        assert younger == pytest.approx(share * total, rel=0.15)
    assert ages.age_of(end, total + 1) > end


def test_removing_blocks_that_were_never_added_keeps_weights_at_zero() -> None:
    ages = LiveAges(1, now=10)
    ages.remove(3, 0, 5)
    ages.young(12)[0] += 1
    assert sum(weights[0] for _, _, weights in ages.spans(13)) == 1
