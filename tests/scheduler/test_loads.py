"""Blocks that storage or a peer brings: slots lent at the beginning, cached at the end, nothing in between."""

from __future__ import annotations

import pytest

from fastdeploy_kvcache_v1.contract.messages import BlockHash, CacheLevel, NoSpace
from fastdeploy_kvcache_v1.errors import CacheStateError, InvariantError

from .scenario import manager, play, play_law, prompt

HOST = CacheLevel.HOST

SCENARIOS = {
    "what was loaded is matched and swapped in as ever": (
        "4+4: run a; load abc 1; arrive 2 2; see abc DHH; start abc r 1+2; step; into 0>1 1>2; finish r; idle"
    ),
    "a load to the device is there at once": (
        "4+0: run a; load abc 1 device; arrive 2 2; start abc r 3+0; table r 0 1 2; finish r; idle;"
        "count device_evictable_blocks 3"
    ),
    "what did not arrive goes back": (
        "4+4: load abcd; count host_free_blocks 0; arrive 1 1; see abcd H; count host_free_blocks 3; load abcd 1;"
        "arrive 0 0; count loaded_blocks 1; count wasted_load_blocks 0; idle"
    ),
    "the slots of a load are counted and nowhere cached": (
        "4+4: load ab 0 host one; load xyz 0 device two; count host_loading_blocks 2;"
        "count device_loading_blocks 3; count host_cached_blocks 0;"
        "count device_cached_blocks 0; count host_free_blocks 2; count device_free_blocks 1; see ab -; see xyz -;"
        "arrive 0 0 one; arrive 0 0 two; idle"
    ),
    "a load evicts what it needs": "4+2 write_through: run ab; flush; see ab HH; load x; see ab H; arrive 1 1; see x H",
    **{
        f"a load to the {tier} gets as many slots as there is room for": (
            f"4+4: load xyz 0 {tier} other; load abc 0 {tier}; lent_to_load 1; no_load 123 1 {tier} 2;"
            f"count allocations_refused 1; count {tier}_free_blocks 0; arrive 1 1; see abc {tier[0].upper()}"
        )
        for tier in ("host", "device")
    },
    # ---- when bytes may come
    "host slots may be filled once the worker has begun the last step": (
        "4+4: load a 0 host first; lent_to_load 1 -1; step; run xyzu; lend 2; load b 0 host second; lent_to_load 1 1"
    ),
    "device slots may be filled once the worker has begun the step that copies them out": (
        "2+4: run ab; step; load x 0 device; lent_to_load 1 2; step; out 1>0; run a again; load y 0 device another;"
        "lent_to_load 1 4"
    ),
    "the next step with copies names the host slots that loads have filled": (
        "4+4 write_through: load abc; arrive 2 2; load x 0 device other; arrive 1 1 other; step; refilled; run r; step;"
        "out 1; refilled 0 1; run s; step; out 1; refilled"
    ),
    "a slot is named as filled also if its block was evicted, before it is copied to": (
        "4+1 write_through: load a; arrive 1 1; run b; step; out 0>0; refilled 0"
    ),
    "a slot is named as filled also if its block was not cached": (
        "4+4 write_through: run a; load a; arrive 1 0; step; out 1; refilled 1; idle"
    ),
    # ---- what happens meanwhile
    "no eviction and no loan gets the slots of a load": (
        "4+4 write_through: load ab 0 host one; load cd 0 device two; run 12; lend 2; back; run 34; lend 2; back;"
        "run 5; lend 2; back; run 67; refuse 3; arrive 2 2 one; arrive 2 2 two; see ab HH; see cd DD; idle"
    ),
    "what comes below an evicted prefix is not cached": (
        "4+4: run ab; load abcd 2; flush; reset; run a again; load abcd 2 host second; arrive 2 0; arrive 2 0 second;"
        "see abcd D; count wasted_load_blocks 4; idle"
    ),
    "a prefix that only a preempted request kept may go before the load ends": (
        "2+0: run a; start a r; load ab 1 device; refuse 1; preempt r; lend 1; arrive 1 0; back; idle"
    ),
    "blocks that a request cached meanwhile are not cached twice": (
        "6+6: load abcd; run ab; count host_free_blocks 2; arrive 4 2; see abcd DDHH; count host_free_blocks 4;"
        "start abcd r; step; into 2>2 3>3; count wasted_load_blocks 2; finish r; idle"
    ),
    **{
        f"of two loads of the same blocks to the {tier} the first one to end counts": (
            f"6+6: load ab 0 {tier}; load abc 0 {tier} longer; arrive 2 2; arrive 3 1 longer; see abc {seen}; idle"
        )
        for tier, seen in (("host", "HHH"), ("device", "DDD"))
    },
    "a load may branch off inside a run in use": (
        "6+6: start abcd r; step; commit r 4; load abxy 2; arrive 2 2; see abxy DDHH; see abcd DDDD; finish r; idle"
    ),
    "what a request computes that was loaded meanwhile is on both tiers": (
        "6+6: start abc r; step; load abc; arrive 3 3; commit r 3; see abc DDD; copied abc yyy; finish r; idle"
    ),
    "a block on its way to the host is not cached again": (
        "2+6: run ab; load abc; lend 2; see ab -; arrive 3 0; step; see abc HH"
    ),
    "device blocks are not cached below a prefix that has left the device": (
        "4+4: run a; load ab 1 device; flush; arrive 1 0; see ab H; idle"
    ),
    "loaded blocks go with a prefix whose swap in failed": (
        "4+4: run a; flush; start a r; load ab 1 device low; arrive 1 1 low; step late; load abc 2; arrive 1 1;"
        "fail late device all r; preempt r; see abc -; idle; count device_free_blocks 4; count host_free_blocks 4"
    ),
    "a swap in above a loaded device block goes on when its request is rolled back": (
        "4+4: run a; flush; start a r; load ab 1 device; arrive 1 1; release r; step; into 1; see ab DD; idle"
    ),
    "a load holds the device pool open": (
        "4+0: load abcd 0 device; stuck 3; resize 6; arrive 4 4; resize 3; see abcd DDD; idle"
    ),
}


@pytest.mark.parametrize("law", SCENARIOS)
def test_law_of_a_load(law: str) -> None:
    play_law(SCENARIOS[law])


@pytest.mark.parametrize("level", ["host", "device"])
@pytest.mark.parametrize("how", ["", "forced"])
def test_load_begun_before_a_reset_is_not_cached_after_it(level: str, how: str) -> None:
    events = (
        f"load ab 0 {level}; reset {how}; count {level}_loading_blocks 2; load xyz 0 {level} other; lent_to_load 1;"
    )
    play(f"{events} arrive 2 0; arrive 0 0 other; see ab -; idle", 3, 3)


def test_nothing_is_loaded_without_prefix_caching() -> None:
    play("no_load abc 0 host 3; idle", 4, 4, enable_prefix_caching=False)


def test_events_tell_of_a_load_when_it_is_complete() -> None:
    cache = play("run a", 4, 4).cache
    cache.take_events()
    cache.begin_load("load", prompt("abcd").hashes, 1)
    assert cache.take_events() == []
    cache.complete_load("load", 2)
    (event,) = cache.take_events()
    assert event == ("stored", HOST, (BlockHash(b"ab"), BlockHash(b"abc")), BlockHash(b"a"))


WRONG = [
    # id, hashes, first block, tier, what is said
    ("load", "x", 0, HOST, "begun already"),
    ("new", "x", 1, HOST, "no block 1 among 1 hashes"),
    ("new", "x", -1, HOST, "no block -1"),
    ("new", "x", 0, CacheLevel.STORAGE, "not storage"),
]


def test_a_load_that_makes_no_sense_is_refused() -> None:
    cache = manager(4, 4)
    assert not isinstance(cache.begin_load("load", prompt("ab").hashes, 0), NoSpace)
    for name, text, first, level, said in WRONG:
        with pytest.raises(CacheStateError, match=said):
            cache.begin_load(name, prompt(text).hashes, first, level=level)
    for wrong in (-1, 3):
        with pytest.raises(CacheStateError, match=f"{wrong} blocks arrived, it has slots for 2"):
            cache.complete_load("load", wrong)
    with pytest.raises(InvariantError, match="loads never completed: load"):
        cache.check_idle()
    assert cache.complete_load("load", 2) == 2
    with pytest.raises(CacheStateError, match="unknown, or has been completed"):
        cache.complete_load("load", 0)
