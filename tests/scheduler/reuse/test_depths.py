"""Which blocks are watched: few of a long prompt, and the same ones of all prompts."""

from __future__ import annotations

from bisect import bisect_right

import pytest

from fastdeploy_kvcache_v1.scheduler.reuse.depths import DEPTHS, last_watched


@pytest.mark.parametrize("length", [1, 7, 8, 100, 5_000, 1 << 20])
def test_a_watched_block_lies_in_the_last_third_of_every_prompt(length: int) -> None:
    assert 0 <= length - DEPTHS[bisect_right(DEPTHS, length) - 1] <= length / 3


def test_few_blocks_of_a_long_prompt_are_watched() -> None:
    assert bisect_right(DEPTHS, 1 << 14) <= 4 * 14


def test_the_deepest_watched_block_is_the_last_one_that_a_prompt_has() -> None:
    assert list(DEPTHS) == sorted(set(DEPTHS))
    assert [last_watched(depth) for depth in (0, 1, 7, 8, 9, 10, 11)] == [0, 1, 7, 8, 8, 10, 10]
