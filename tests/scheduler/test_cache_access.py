"""A request may be kept from reading the cache, from writing to it, or from both; nobody else notices."""

from __future__ import annotations

import random

import pytest

from fastdeploy_kvcache_v1.metadata import Allocation, CacheAccess
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager
from fastdeploy_kvcache_v1.scheduler.cache_utils import GivenHashes
from fastdeploy_kvcache_v1.scheduler.open_prefills import OpenPrefills

from .scenario import cached, manager, prompt, run

WRITES_ONLY = CacheAccess(reads=False)
READS_ONLY = CacheAccess(writes=False)
NOTHING = CacheAccess(reads=False, writes=False)


def limited(text: str, access: CacheAccess) -> GivenHashes:
    sequence = prompt(text)
    sequence.access = access
    return sequence


def start(cache: CacheManager, text: str, access: CacheAccess, name: str = "limited", *, resumed: bool = False) -> int:
    """Match and allocate; returns the blocks that were found."""
    match = cache.match_prefix(name, limited(text, access), resumed=resumed)
    assert isinstance(cache.allocate(name, len(text)), Allocation)
    return match.num_blocks


def whole(cache: CacheManager, text: str, access: CacheAccess) -> int:
    """A whole request; returns the blocks that it found."""
    found = start(cache, text, access)
    cache.take_swap_step()
    cache.commit("limited", len(text))
    cache.check()
    cache.finish("limited")
    cache.check_idle()
    return found


def test_one_that_does_not_read_computes_all_and_leaves_it_to_others() -> None:
    cache = manager(12)
    run(cache, "abc!")
    assert whole(cache, "abcde!", WRITES_ONLY) == 0
    assert cached(cache, "abcde") == ["device"] * 5
    assert cache.stats().counters.duplicate_blocks == 3, "what was cached already stays in its place"


def test_one_that_does_not_read_fills_what_was_on_the_host_only() -> None:
    cache = manager(4, 8)
    for text in ("abc!", "wxyz!"):
        run(cache, text)
    assert cached(cache, "abc") == ["host"] * 3
    assert whole(cache, "abc!", WRITES_ONLY) == 0
    assert cached(cache, "abc") == ["device"] * 3 or cached(cache, "abc") == ["both"] * 3
    assert cache.stats().counters.host_hit_tokens == 0


def test_one_that_does_not_write_uses_the_prefix_and_leaves_nothing() -> None:
    cache = manager(12)
    run(cache, "abc!")
    assert whole(cache, "abcde!", READS_ONLY) == 3
    assert cached(cache, "abcde") == ["device"] * 3
    assert cache.num_free_device_blocks == 9


def test_one_that_does_neither_leaves_no_trace() -> None:
    cache = manager(12)
    run(cache, "abc!")
    assert whole(cache, "abcde!", NOTHING) == 0
    assert cached(cache, "abcde") == ["device"] * 3


@pytest.mark.parametrize(("access", "found"), [(WRITES_ONLY, 0), (READS_ONLY, 0), (NOTHING, 0), (CacheAccess(), 4)])
def test_what_a_preempted_request_finds_of_its_own_work(access: CacheAccess, found: int) -> None:
    """One that does not read reads nothing; of one that does not write there is nothing."""
    cache = manager(12)
    start(cache, "abcd!", access)
    cache.take_swap_step()
    cache.commit("limited", 5)
    cache.preempt("limited")
    assert start(cache, "abcd!", access, resumed=True) == found
    cache.check()
    cache.finish("limited")
    cache.check_idle()


def test_one_that_does_not_read_counts_as_no_question_to_the_cache() -> None:
    cache = manager(12)
    whole(cache, "abc!", WRITES_ONLY)
    whole(cache, "abc!", READS_ONLY)
    counters = cache.stats().counters
    assert (counters.requests_admitted, counters.query_tokens, counters.device_hit_tokens) == (2, 4, 3)


def test_nobody_waits_for_blocks_that_are_not_written_nor_for_some_that_are_not_read() -> None:
    cache = manager(12)
    start(cache, "abcd!", READS_ONLY)
    assert not cache.uncommitted("limited", 5)
    prefills = OpenPrefills(block_size=1, worth_tokens=1)
    prefills.compute("leader", prompt("abcd").hashes)
    assert prefills.to_wait_for(limited("abcd!", WRITES_ONLY), 0, []) == 0
    assert prefills.to_wait_for(limited("abcd!", READS_ONLY), 0, []) == 4


def test_a_request_of_the_line_that_reads_nothing_keeps_nothing() -> None:
    for access, kept in ((CacheAccess(), ["device"] * 2), (WRITES_ONLY, [])):
        cache = manager(4)
        for text in ("ab!", "cd!"):
            run(cache, text)
        cache.expect([limited("ab!", access)])
        run(cache, "12!")
        assert cached(cache, "ab") == kept


@pytest.mark.parametrize("seed", range(8))
def test_any_mix_keeps_every_invariant(seed: int) -> None:
    """Requests of every kind over the same few prompts, overlapping and preempted, with a host tier under pressure."""
    rng = random.Random(seed)
    cache = manager(10, 6, policy=rng.choice(["write_back", "write_through", "auto"]))
    kinds = (CacheAccess(), WRITES_ONLY, READS_ONLY, NOTHING)
    texts = ["abc!", "abcd!", "abx!", "q!", "qrs!"]
    live: dict[str, str] = {}
    for number in range(150):
        name = f"r{number}"
        text, access = rng.choice(texts), rng.choice(kinds)
        match = cache.match_prefix(name, limited(text, access))
        assert access.reads or not match.num_blocks
        if isinstance(cache.allocate(name, len(text)), Allocation):
            live[name] = text
        else:
            cache.release(name)
        cache.take_swap_step()
        for other in rng.sample(sorted(live), min(len(live), 1 + (len(live) > 2))):
            cache.commit(other, len(live[other]))
            (cache.preempt if rng.random() < 0.3 else cache.finish)(other)
            del live[other]
        cache.check()
    for other in live:
        cache.finish(other)
    cache.take_swap_step()
    cache.check_idle()
