"""A host tier that is short holds little twice: what has come back to the device gives up its host copy first."""

from __future__ import annotations

import pytest

from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager
from fastdeploy_kvcache_v1.scheduler.policies import host_duplicates
from fastdeploy_kvcache_v1.scheduler.policies.host_duplicates import SHORT_HOST
from fastdeploy_kvcache_v1.scheduler.reuse import judge

from .scenario import manager, play, play_law, run

TWO = "run a; run b; run c; run d; step; see a H; see b H; see c D; see d D;"
"""`a` and `b` are on the host, `c` and `d` on the device, which is full."""

SCENARIOS = {
    "what has come back goes first although it was used last": (
        f"2+3: {TWO} run b; copied b y; run e; see b D; copied b n; see a H; see c H; see d H"
    ),
    "it goes while its request still runs": (
        f"2+2: {TWO} resize 3; start b1; step; into 1; see a -; run e; see c H; see d H; commit b1 2; finish b1;"
        "copied b1 nn"
    ),
    "when it leaves the device it is copied again and is the youngest there": (
        f"2+3: {TWO} run b; run e; run f; step; see b H; see a -"
    ),
    "one that was not given up is the youngest copy when its run leaves the device": (
        f"2+4: {TWO} resize 3; run a; run 1; run 2; run 3; see a H; see b H; see c H; see d H; run 4; step; see b -;"
        "run 5; step; see c -; run 6; step; see d -; see a H"
    ),
    "one that is the only copy again stays while a request waits for it": (
        f"2+4: {TWO} run b; push 2; step; see b H; match b waits; run e; run f; run g; run h; run i; run j; run k;"
        "uses waits H; release waits; idle"
    ),
    "a larger host tier keeps its copies": (
        f"2+{2 * SHORT_HOST + 1}: {TWO} run b; run e; run b; run f; run b; run g; run b; run h; copied b y; see a -"
    ),
    "a copy that a store reads stays": (
        "3+3: run a; run b; run c; start d; step late; commit d 1; finish d; store late a; run a; run e; run f;"
        "copied a y; see b -; end; run a; run g; see a D; copied a n"
    ),
    "a copy back that fails after it was given up is nowhere": (
        f"2+2: {TWO} start b1; step late; resize 4; run e; run f; run g; fail late device all b1; finish b1; see b -"
    ),
    # ---- where nothing is saved at eviction no copy is given up
    "write through keeps all copies": (
        "4+4 write_through: run a; run b; run c; run d; run e; run e; see a -; copied b y; copied c y; copied d y;"
        "copied e y"
    ),
    "write through selective keeps all copies": (
        "4+4 write_through_selective: run a; run a; run b; run b; run c; run c; run d; run d; run e; run e; see a -;"
        "copied b y; copied c y; copied d y; copied e y"
    ),
}


@pytest.mark.parametrize("law", SCENARIOS)
def test_law_of_a_duplicate(law: str) -> None:
    play_law(SCENARIOS[law], write_through_threshold=1)


def hit_rate_in_turns(cache: CacheManager) -> float:
    """Of the last of several rounds in which 58 prompts of two blocks come in turns."""
    for number in range(6 * 58):
        if number == 5 * 58:
            before = cache.stats().counters
        run(cache, f"{chr(0x100 + number % 58)}.!")
    after = cache.stats().counters
    num_hits = after.device_hit_tokens + after.host_hit_tokens - before.device_hit_tokens - before.host_hit_tokens
    return num_hits / (2 * 58)


@pytest.mark.parametrize("policy", ["write_back", "auto"])
@pytest.mark.parametrize("eviction", ["lru", "adaptive"])
def test_two_tiers_hold_as_many_blocks_as_one_tier_of_their_size(
    policy: str, eviction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 and 64 blocks for 116."""
    assert hit_rate_in_turns(manager(64, 64, policy, eviction_policy=eviction)) == 1.0
    monkeypatch.setattr(host_duplicates, "SHORT_HOST", 0)
    monkeypatch.setattr(judge, "SHORTEST", 1 << 30)  # recency rules: of turns, what is learned drops the same blocks
    assert hit_rate_in_turns(manager(64, 64, policy, eviction_policy=eviction)) < 0.7


def test_both_parts_of_a_duplicate_that_is_cut_are_duplicates() -> None:
    scene = play("run abcd; run 123456; run abcd; copied abcd yyyy", 6, 12)
    for text in ("ab5", "a6"):
        scene.start(text)
        found = [each for each in scene.cache._tree.runs() if each.host is not None and each.host.is_duplicate]
        assert sum(each.length for each in found) == 4
        scene.cache.check()
