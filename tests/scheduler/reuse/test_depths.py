"""Which blocks are watched: few of a long prompt, and the same ones of all prompts."""

from __future__ import annotations

from bisect import bisect_right

import pytest

from fastdeploy_kvcache_v1.scheduler.reuse.depths import DEPTHS, WIDTHS


@pytest.mark.parametrize("length", [1, 7, 8, 100, 5_000, 1 << 20])
def test_a_watched_block_lies_in_the_last_third_of_every_prompt(length: int) -> None:
    assert 0 <= length - DEPTHS[bisect_right(DEPTHS, length) - 1] <= length / 3


def test_few_blocks_of_a_long_prompt_are_watched() -> None:
    assert bisect_right(DEPTHS, 1 << 14) <= 4 * 14


def test_the_widths_add_up_to_the_depths() -> None:
    assert list(DEPTHS) == sorted(set(DEPTHS))
    assert [sum(WIDTHS[: index + 1]) for index in range(40)] == list(DEPTHS[:40])
