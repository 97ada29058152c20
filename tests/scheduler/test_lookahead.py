"""What the waiting requests will hit leaves last."""

from __future__ import annotations

from string import ascii_letters

import pytest

from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager
from fastdeploy_kvcache_v1.scheduler.lookahead import MOST_RUNS
from fastdeploy_kvcache_v1.scheduler.policies.tables import EVICTION_POLICIES
from fastdeploy_kvcache_v1.scheduler.radix_tree import RadixTree

from .scenario import cached, expect, manager, on_host, prompt, run


def three_prompts(**options: int) -> CacheManager:
    cache = manager(6, **options)
    for text in ("ab!", "cd!", "ef!"):
        run(cache, text)
    return cache


def test_without_a_line_the_oldest_leaves() -> None:
    cache = three_prompts()
    run(cache, "12!")
    assert [cached(cache, text) for text in ("ab", "cd", "ef")] == [[], ["device"] * 2, ["device"] * 2]


def test_what_the_line_needs_leaves_last() -> None:
    cache = three_prompts()
    expect(cache, "ab")
    run(cache, "12!")
    assert [cached(cache, text) for text in ("ab", "cd", "ef")] == [["device"] * 2, [], ["device"] * 2]


def test_the_head_of_the_line_is_spared_for_longest() -> None:
    cache = three_prompts()
    expect(cache, "ab", "cd", "ef")
    run(cache, "12!")
    assert [cached(cache, text) for text in ("ab", "cd", "ef")] == [["device"] * 2, ["device"] * 2, []]
    expect(cache, "ab", "cd")
    run(cache, "3456!")
    assert [cached(cache, text) for text in ("ab", "cd")] == [["device"] * 2, []]


def test_the_longer_the_line_that_needs_a_prefix_the_head_still_counts() -> None:
    """A prefix that the first and the last in line share is needed by the first."""
    cache = three_prompts()
    expect(cache, "ab", "cd", "ab")
    run(cache, "1234!")
    assert [cached(cache, text) for text in ("ab", "cd")] == [["device"] * 2, []]


def test_the_line_counts_for_the_host_tier_too() -> None:
    cache = manager(2, 4)
    for text in ("ab!", "cd!", "ef!"):
        run(cache, text)
    assert on_host(cache, "ab") == on_host(cache, "cd") == [True] * 2
    expect(cache, "ab")
    run(cache, "12!")
    assert [cached(cache, text) for text in ("ab", "cd", "ef")] == [["host"] * 2, [], ["host"] * 2]


@pytest.mark.parametrize("order", EVICTION_POLICIES)
@pytest.mark.parametrize(
    ("line", "copied"), [("", "jklm"), ("j", "jklmn"), ("k", "jlmn"), ("l", "jkmn"), ("mlkj", "jnopq"), ("XYZ", "jklm")]
)
def test_what_the_line_needs_is_not_copied_ahead_of_what_leaves_before_it(order: str, line: str, copied: str) -> None:
    """The host tier is full: room for the copies is made while the order of the device is gone through."""
    cache = manager(40, 160, "auto", device_eviction=order)
    for number in range(160):
        run(cache, f"{1000 + number:c}!")
    letters = ascii_letters[:40]
    for letter in letters:
        run(cache, f"{letter}!")
    assert cache.stats().host_free_blocks == 0
    cache.lend(5)
    cache.take_swap_step()  # `f` to `j` are copied ahead
    cache.lend(4)
    expect(cache, *line)
    cache.take_swap_step()
    cache.check()
    on_device = [letter for letter in letters if cached(cache, letter) == ["device"]]
    assert "".join(on_device) == letters[9:]
    assert "".join(letter for letter in on_device if on_host(cache, letter)[0]) == copied


def test_the_line_cannot_keep_more_than_there_is() -> None:
    cache = three_prompts()
    expect(cache, "ab", "cd", "ef")
    run(cache, "123456!")
    assert [cached(cache, text) for text in ("ab", "cd", "ef")] == [[], [], []]


def test_a_line_that_went_away_spares_nothing() -> None:
    cache = three_prompts()
    expect(cache, "ab")
    expect(cache)
    run(cache, "12!")
    assert cached(cache, "ab") == []


def test_a_line_is_forgotten_with_its_step() -> None:
    """A caller that tells nothing more, as an engine that has stopped, is not held to what it said."""
    cache = three_prompts()
    expect(cache, "ab")
    run(cache, "12!")
    run(cache, "34!")
    run(cache, "56!")
    run(cache, "78!")
    assert cached(cache, "ab") == []


def test_a_line_told_before_a_reset_does_no_harm() -> None:
    cache = three_prompts()
    expect(cache, "ab", "cd")
    cache.reset_cache()
    run(cache, "123456!")
    run(cache, "ab!")
    cache.check()
    assert cached(cache, "ab") == ["device"] * 2


def test_only_as_many_requests_as_the_settings_say_are_looked_at() -> None:
    cache = manager(6, lookahead_requests=1)
    for text in ("ab!", "cd!", "ef!"):
        run(cache, text)
    expect(cache, "ef", "ab")
    run(cache, "12!")
    assert cached(cache, "ab") == []


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of runs of each prefix that was looked for."""
    lengths: list[int] = []
    plain = RadixTree.find

    def find(self: RadixTree, hashes):  # type: ignore[no-untyped-def]
        path = plain(self, hashes)
        lengths.append(len(path))
        return path

    monkeypatch.setattr(RadixTree, "find", find)
    return lengths


def test_a_step_that_evicts_nothing_does_not_look(looked: list[int]) -> None:
    cache = three_prompts()
    expect(cache, "ab", "cd")
    run(cache, "ab!", "again")
    assert looked == []


def test_a_step_that_evicts_twice_looks_once(looked: list[int]) -> None:
    cache = three_prompts()
    expect(cache, "ab")
    cache.match_prefix("x", prompt("12!"))
    cache.allocate("x", 1)
    cache.allocate("x", 2)
    assert cache.stats().counters.device_evicted_blocks == 2
    assert looked == [1]


def test_a_step_looks_at_a_bounded_number_of_runs(looked: list[int]) -> None:
    """Prefixes that are many runs each, because others end at each of their blocks."""
    text = "".join(chr(ord("A") + number) for number in range(40))
    cache = manager(200)
    for end in range(1, len(text)):
        run(cache, text[:end] + "!", f"{end}")
        run(cache, text[:end] + "?x", f"branch {end}")
    cache.expect([prompt(text) for _ in range(16)])
    run(cache, "1" * 150 + "!")
    assert looked[0] > 20
    assert MOST_RUNS - max(looked) < sum(looked) <= MOST_RUNS + max(looked)
