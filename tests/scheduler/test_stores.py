"""Blocks that storage or a peer reads: their bytes stay until that has ended, whatever happens to the blocks."""

from __future__ import annotations

import pytest

from fastdeploy_kvcache_v1.contract.messages import StoreSource
from fastdeploy_kvcache_v1.errors import BlockPoolError, CacheStateError
from fastdeploy_kvcache_v1.scheduler.block_pool import BlockPool

from .scenario import block, play, play_law, prompt

SCENARIOS = {
    "a store names the blocks of its step": (
        "8+8 write_through: run ab; step; run abcd; step late; store late abc,abcd; end; idle"
    ),
    "no block leaves the host while that makes no room: a store reads its slot": (
        "8+2 write_through: run ab; step late; store late a,ab; run xyz; step; copied ab yy; copied xyz nnn; end;"
        "run uvw; step; copied ab nn; idle"
    ),
    "nor where another block cannot leave for another reason": (
        "8+3 write_through: run ab; step late; store late a,ab; load x; run yz; step; copied ab yy; copied yz nn;"
        "arrive 0 0; end; run uvw; step; copied ab nn; idle"
    ),
    "blocks behind those that are read leave, and no more": (
        "8+4 write_through: run ab; step late; run abcd; step; store late a,ab; run xyz; step; copied abcd yynn;"
        "copied xyz yyn; end; idle"
    ),
    **{
        f"a tail that took the place of another one, which {how}, is stored once": (
            f"{size} write_through: start ab b; start ac c; step; commit b 2; commit c 2; step late; finish b;"
            f"finish c; {left}; store late {stored}; end; idle"
        )
        for how, size, left, stored in (
            ("failed", "8+8", "fail late host 0; push 6; see ac DD", "ac,a"),
            ("was evicted", "4+3", "run ac; push 2; load y; arrive 0 0; see ac DD", "ac,a"),
        )
    },
    "what left the host before is not stored": "8+2 write_through: run ab; step late; run xy; step; store late -; idle",
    "a slot that another step filled since is not taken for the old block": (
        "8+1 write_through: run a; step old; out 0>0; run b; step new; out 1>0; store old -; store new b; end"
    ),
    "only the part that the step copied is stored of a run that was joined": (
        "8+8 write_through: run ab; step late; run abcd; step; store late a,ab; end; idle"
    ),
    "and where its blocks were moved": (
        "8+8 write_through: run ab; step; run abcd; step late; run abcdef; step; store late abc,abcd; end; idle"
    ),
    "and where they were moved twice": (
        "16+16 write_through: run abcd; step; run abcdef; step; run abcdefgh; step late; run abcdefghi;"
        "run abcdefghij; step; store late abcdefg,abcdefgh; end; idle"
    ),
    "and all parts of one that was cut": (
        "8+8 write_through: run abcde; step late; start abcx upper; start abcdy lower;"
        "store late a,ab,abc,abcd,abcde; end; finish upper; finish lower; idle"
    ),
    "a copy of which a part failed is not stored": (
        "8+8 write_through: run ab; step late; fail late host 1; copied ab nn; store late -; idle"
    ),
    "of a step that brings blocks back too only what it copied to the host is stored": (
        "4+8: run abcd; run wxyz; step; start abcd; step late; fail late host 3; store late w,wx,wxy; end;"
        "finish abcd; idle"
    ),
    "stores of the same blocks end one by one": (
        "8+2 write_through: run ab; step late; store late a,ab one; store late a,ab two; end one; run xy; step;"
        "copied ab yy; end two; idle"
    ),
    **{
        f"a {how} reset leaves the bytes of a store alone": (
            f"8+2 write_through: run ab; step late; store late a,ab; reset {how}; see ab -; count device_free_blocks 8;"
            f"count host_free_blocks 0; run xy; step; copied xy nn; reset {how}; end; idle; count host_free_blocks 2"
        )
        for how in ("plain", "forced")
    },
    "a request goes on below blocks that are stored": (
        "8+8 write_through: run ab; step late; store late a,ab; run abcd; step; see abcd DDDD; end; idle"
    ),
    "a store keeps no block on the device": (
        "4+8 write_through: run abcd; step late; store late a,ab,abc,abcd; run wxyz; step; see abcd HHHH; end; idle"
    ),
    "a failed copy beside blocks that are stored frees no slot of theirs": (
        "8+4 write_through: run ab; step one; run abcd; step two; run abcd again; store one a,ab; fail two host all;"
        "run wxyz; step; copied wxyz yynn; end; idle"
    ),
    # ---- of host slots, by their prompt
    "a store on the host names blocks that a step took there": (
        "8+8 write_through: run abcd; store_on_host abcd 0 -; step; store_on_host abcd 1 ab,abc,abcd; end;"
        "store_on_host ab 0 a,ab; store_on_host abcd 4 - nothing; end; idle"
    ),
    "and does not need the blocks before them there": (
        "8+2: run ab; load abcd 2; arrive 2 2; copied abcd nnyy; store_on_host abcd 0 - nothing;"
        "store_on_host abcd 2 abc,abcd; end; idle"
    ),
    # ---- of device slots
    "a store on the device names blocks as far as they are there": (
        "8+0: run abc; store_on_device abcd 1 ab,abc; store_on_device abcd 3 - nothing; end; idle"
    ),
    "a slot is given to nobody else while it is read although its block was computed again": (
        "8+0: run ab; store_on_device ab 0 a,ab; start ab w/r; step; commit w/r 2; count duplicate_blocks 0;"
        "finish w/r; see ab DD; count device_free_blocks 4; refuse 7; end; count device_free_blocks 6; idle"
    ),
    "a slot is given to nobody else while it is read although its block is evicted": (
        "4+0: run ab; store_on_device ab 0 a,ab; match wxyz big; full big 3 3 2; grow big 2; release big; run uv;"
        "run wx; refuse 3; end; lend 4; back; idle"
    ),
    "blocks that are evicted while they are read free their slots at the end": (
        "4+4: run ab; store_on_device ab 0 a,ab; match wxyz r; grow r 2; step; full r 3; finish r; resize 8;"
        "start uvwxyz r; refuse 1; step; finish r; end; idle"
    ),
    "two readers of a slot end one by one": (
        "2+0: run ab; store_on_device ab 0 a,ab one; store_on_device a 0 a two; reset; count device_free_blocks 0;"
        "count device_cached_blocks 0; end one; count device_free_blocks 1; end two; count device_free_blocks 2; idle"
    ),
    "a reset leaves what is read on the device alone, and those that go on using it": (
        "4+0: run ab; start abc r; store_on_device ab 0 a,ab; reset; see ab -; step; finish r; start xy; refuse 1;"
        "step; finish xy; end; idle"
    ),
    "a forced reset leaves what is read on the device alone": (
        "4+0: run ab; start abc r; store_on_device ab 0 a,ab; reset forced; see ab -; start xy; refuse 1; step;"
        "finish xy; end; idle"
    ),
    "what waits for a copy that was not told is not read": (
        "4+4: run ab; run wxyz; step; store_on_device ab 0 -; start ab; store_on_device ab 0 -; step late;"
        "store_on_device ab 0 a,ab; fail late device all ab; preempt ab; end; idle"
    ),
    "nor is what lies below it": (
        "8+8: start a first; start ab second; step; commit first 1; finish first; run 123456; see a H; start a waits;"
        "commit second 2; finish second; see ab iD; store_on_device ab 0 -"
    ),
    "the device tier does not shrink below what is read": (
        "4+0: run abcd; store_on_device abcd 0 a,ab,abc,abcd; stuck 2; end; resize 2"
    ),
}


@pytest.mark.parametrize("law", SCENARIOS)
def test_law_of_a_store(law: str) -> None:
    play_law(SCENARIOS[law])


@pytest.mark.parametrize("how", ["", "forced"])
def test_reset_drops_an_unused_swap_in_of_blocks_that_a_store_reads(how: str) -> None:
    """No request uses the blocks any more; one below them is on the device, so their swap-in was not cancelled."""
    scene = play("run abc; step late; run 123456789xyz; step; see abc HHH", 12, 16, "write_through")
    cache = scene.cache
    cache.match_prefix("computes", prompt("abcd!"), max_blocks=0)
    scene.play("grow computes 4; step; store late a,ab,abc; start abc plans; commit computes 4; release plans")
    scene.play(f"finish computes; see abc iii; reset {how}; step; into 0; count device_free_blocks 12; end")
    cache.check_idle()
    scene.count("host_free_blocks", "16")


def test_a_store_of_a_step_of_long_ago_finds_nothing() -> None:
    scene = play("run ab; step late", 8, 8, "write_through")
    for number in range(300):
        scene.play(f"run {chr(1000 + number)}; step")
    scene.store("late", "-")


def test_a_store_of_a_part_of_a_run_lets_the_rest_leave_the_host() -> None:
    scene = play("run abcdef; step late", 8, 6, "write_through")
    late, cache = scene.steps["late"], scene.cache
    source = cache.begin_store("store", late.step, frozenset(late.swap_out.target_slots[2:4]))
    parents = (block("ab"), block("abc"))
    assert source == StoreSource((block("abc"), block("abcd")), late.swap_out.target_slots[2:4], parents)
    scene.play("run uvwxyz; step; copied uvwxyz yyyynn; end; idle")


@pytest.mark.parametrize(
    # What is computed, each in a step of its own; what is stored of the last step; the block before each block.
    ("prompts", "blocks", "parents"),
    [
        ("ab", "a,ab", "-,a"),
        ("ab abcd", "abc,abcd", "ab,abc"),
        ("abcd abxy", "abx,abxy", "ab,abx"),
        ("ab abcd abcdef", "abcde,abcdef", "abcd,abcde"),
        ("ab abc abx abxyz", "abxy,abxyz", "abx,abxy"),
    ],
)
def test_stored_block_comes_with_the_hash_of_the_block_before_it(prompts: str, blocks: str, parents: str) -> None:
    scene = play(";".join(f"run {text}; step {text}" for text in prompts.split()), 16, 16, "write_through")
    step = scene.steps[prompts.split()[-1]]
    source = scene.cache.begin_store("store", step.step, frozenset(step.swap_out.target_slots))
    assert ",".join(each.decode() for each in source.hashes) == blocks
    assert ",".join("-" if each is None else each.decode() for each in source.parents) == parents


def test_a_store_on_the_device_takes_a_piece_of_a_prompt() -> None:
    source = play("run abcdef", 8).cache.begin_device_store("store", prompt("abcdef").hashes, 1, most=2)
    assert source == StoreSource((block("ab"), block("abc")), (1, 2))


def test_store_id_in_use_and_unknown_store_id_are_refused() -> None:
    cache = play("run ab; store_on_device ab 0 a,ab; store_on_device x 0 - nothing", 8).cache
    with pytest.raises(CacheStateError, match="store store has begun"):
        cache.begin_device_store("store", prompt("ab").hashes, 0)
    with pytest.raises(CacheStateError, match="store store has begun"):
        cache.begin_store("store", 0, frozenset())
    cache.end_store("store")
    for unknown in ("store", "nothing"):
        with pytest.raises(CacheStateError, match=f"store {unknown} is unknown"):
            cache.end_store(unknown)


def test_a_held_slot_is_not_given_back_twice() -> None:
    pool: BlockPool[int] = BlockPool("device", 4)
    slots = pool.allocate(3)
    pool.hold(slots[:2])
    pool.free(slots)
    assert (pool.num_free, pool.num_held, pool.num_owned) == (2, 0, 0)
    with pytest.raises(BlockPoolError, match="not allocated"):
        pool.free(slots[:1])
    pool.check_owners([])
    pool.release_held(slots[:2])
    assert pool.num_free == 4
    pool.check_owners([])


def test_looking_for_cached_blocks_changes_nothing() -> None:
    cache = play("run abcd; run xy; step", 4, 8).cache  # `c` and `d` have left the device
    before = cache.stats()
    for text, cached, on_device in (("", 0, 0), ("a", 1, 1), ("abc", 3, 2), ("abcde", 4, 2), ("zz", 0, 0)):
        hashes = prompt(text).hashes
        assert (cache.count_cached(hashes), cache.count_on_device(hashes)) == (cached, on_device)
    assert cache.stats() == before
    cache.check_idle()
