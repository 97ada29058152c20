"""Scenarios with exact slots: what is evicted, copied and kept, in which order, under which policy."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise

import pytest

from fastdeploy_kvcache_v1.cache_manager import CacheManager
from fastdeploy_kvcache_v1.cache_utils import BlockHasher
from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.errors import (
    CacheStateError,
    ConfigError,
    PoolInUseError,
    UnknownRequestError,
)
from fastdeploy_kvcache_v1.metadata import (
    Allocation,
    BlockHash,
    CacheLevel,
    CacheStatus,
    NoSpace,
    TransferResult,
)

from .scenario import cached, manager, pairs, prompt, run


def test_leaves_go_first_and_the_least_recently_used_request_before_others() -> None:
    cache = manager(6)
    run(cache, "abc!")
    run(cache, "xyz!")
    run(cache, "ab!")  # touches a and b, not c
    run(cache, "1!")
    assert cached(cache, "abc") == ["device", "device"]
    run(cache, "2!")
    assert cached(cache, "xyz") == ["device", "device"]
    run(cache, "345!")
    assert cached(cache, "xyz") == []
    assert cached(cache, "abc") == ["device"]  # b went before a


def test_exactly_as_many_blocks_are_evicted_as_needed() -> None:
    cache = manager(8, 4)
    run(cache, "abcdefg!")
    step = run(cache, "123!")
    assert len(step.evict) == 2
    assert cached(cache, "abcdefg") == ["device"] * 5 + ["host"] * 2
    assert cache.stats().counters.device_evicted_blocks == 2
    # The host tier holds f, g. Three more evictions need three host slots: two free ones, and the oldest leaf's.
    run(cache, "456!")
    assert cached(cache, "abcdefg") == ["device"] * 2 + ["host"] * 4
    assert cache.stats().counters.host_evicted_blocks == 1
    assert cache.stats().host_free_blocks == 0


def test_write_back_copies_on_eviction_and_swaps_in_what_is_matched() -> None:
    cache = manager(3, 3)
    run(cache, "abc!")
    step = run(cache, "xyz!")
    assert pairs(step.evict) == [(0, 0), (1, 1), (2, 2)]
    assert cached(cache, "abc") == ["host"] * 3
    cache.match_prefix("again", prompt("abc!"))
    result = cache.allocate("again", 4)
    assert isinstance(result, NoSpace)
    assert (result.needed, result.available) == (4, 3)
    result = cache.allocate("again", 3)
    assert isinstance(result, Allocation)
    assert (result.num_device_tokens, result.num_host_tokens) == (0, 3)
    assert result.new_blocks == []
    step = cache.take_swap_step()
    # x, y, z leave the device although the host is full of pinned sources: they are lost, never overwritten onto those.
    assert not step.evict
    assert pairs(step.swap_in) == list(zip([0, 1, 2], result.block_table, strict=True))
    assert cache.stats().counters.device_lost_blocks == 3


def test_a_swap_in_source_is_not_handed_to_an_eviction_of_the_same_step() -> None:
    cache = manager(4, 2)
    run(cache, "ab!")
    run(cache, "wxyz!")
    assert cached(cache, "ab") == ["host", "host"]
    cache.match_prefix("back", prompt("ab!"))
    cache.allocate("back", 2)
    cache.match_prefix("new", prompt("12!"))
    cache.allocate("new", 2)
    step = cache.take_swap_step()
    assert set(step.swap_in.source_slots).isdisjoint(step.evict.target_slots)
    cache.check()


def test_a_block_on_its_way_to_the_host_is_found_only_once_the_worker_knows() -> None:
    cache = manager(2, 2)
    run(cache, "ab!")
    cache.match_prefix("new", prompt("12!"))
    cache.allocate("new", 2)
    assert cached(cache, "ab") == []
    cache.take_swap_step()
    assert cached(cache, "ab") == ["host", "host"]


def test_write_through_copies_complete_blocks_once() -> None:
    cache = manager(4, 8, "write_through")
    assert not run(cache, "ab!").evict
    step = run(cache, "12!")
    assert pairs(step.evict) == [(0, 0), (1, 1)]
    step = run(cache, "ab!")
    assert len(step.evict) == 2  # 1 and 2; a and b have their copies
    step = run(cache, "wxyz!")
    assert not step.evict  # everything evicted was on the host already
    assert cached(cache, "ab") == ["host", "host"]
    assert cached(cache, "12") == ["host", "host"]


@pytest.mark.parametrize("threshold", [1, 2, 3])
def test_selective_copies_at_the_threshold(threshold: int) -> None:
    cache = manager(8, 8, "write_through_selective", write_through_threshold=threshold)
    run(cache, "ab!")
    for hits in range(1, 5):
        step = run(cache, "abc!" if hits == 1 else "ab!", f"hit {hits}")
        assert len(step.evict) == (2 if hits == threshold else 0), hits
    run(cache, "12345678!")
    assert cached(cache, "ab") == ["host", "host"]
    assert cached(cache, "abc") == ["host", "host"]  # c was never hit: gone with its eviction


def test_two_requests_share_one_swap_in_and_one_of_them_may_leave() -> None:
    cache = manager(6, 4)
    run(cache, "ab!")
    run(cache, "123456!")
    for name in ("one", "two"):
        cache.match_prefix(name, prompt("ab!"))
        assert isinstance(cache.allocate(name, 3), Allocation)
    assert cache.block_table("one")[:2] == cache.block_table("two")[:2]
    cache.release("one")
    cache.check()
    step = cache.take_swap_step()
    assert list(step.swap_in.target_slots) == cache.block_table("two")[:2]


def test_a_cancelled_swap_in_leaves_no_trace() -> None:
    cache = manager(4, 4)
    run(cache, "ab!")
    run(cache, "1234!")
    cache.take_swap_step()
    before = cache.stats()
    for _ in range(3):
        cache.match_prefix("r", prompt("ab!"))
        nodes = cache.nodes("r")
        assert [node.status for node in nodes] == [CacheStatus.HOST] * 2
        assert isinstance(cache.allocate("r", 2), Allocation)
        assert [node.status for node in cache.nodes("r")] == [CacheStatus.SWAP_TO_DEVICE] * 2
        cache.release("r")
    assert not cache.take_swap_step().swap_in
    after = cache.stats()
    assert after.counters.device_hit_tokens == before.counters.device_hit_tokens
    assert after.counters.host_hit_tokens == before.counters.host_hit_tokens
    assert after.counters.requests_admitted == before.counters.requests_admitted
    assert cached(cache, "ab") == ["host", "host"]


def test_a_match_that_cannot_be_admitted_can_be_retried_forever() -> None:
    cache = manager(4, 4)
    run(cache, "abc!")
    cache.match_prefix("holder", prompt("xy!"))
    assert isinstance(cache.allocate("holder", 2), Allocation)
    before = [(node.hash, node.pins, node.hits) for node in cache.match_prefix("look", prompt("abc!")).nodes]
    cache.release("look")
    stats = cache.stats()
    for attempt in range(1000):
        cache.match_prefix("big", prompt("abc456!"))
        assert isinstance(cache.allocate("big", 6), NoSpace)
        if attempt % 2:
            assert isinstance(cache.allocate("big", 7), NoSpace)
        cache.release("big")
    after = [(node.hash, node.pins, node.hits) for node in cache.match_prefix("look", prompt("abc!")).nodes]
    cache.release("look")
    assert after == before
    assert cache.stats().device_evictable_blocks == stats.device_evictable_blocks
    cache.finish("holder")
    cache.take_swap_step()
    cache.check_idle()


def test_a_second_finish_is_an_error_that_takes_nobody_elses_blocks() -> None:
    cache = manager(4)
    cache.match_prefix("one", prompt("ab!"))
    cache.allocate("one", 3)
    cache.finish("one")
    cache.match_prefix("two", prompt("xy!"))
    cache.allocate("two", 3)
    before = cache.stats()
    for end in (cache.finish, cache.preempt, cache.release):
        with pytest.raises(UnknownRequestError, match="one"):
            end("one")
    assert cache.stats() == before
    cache.check()


def test_the_newest_token_is_never_cached_even_if_the_caller_counts_it() -> None:
    cache = manager(8)
    hasher = BlockHasher(1)
    hasher.extend([1, 2, 3])
    cache.match_prefix("r", hasher)
    cache.allocate("r", 4)
    cache.take_swap_step()
    hasher.extend([4])  # sampled: its KV is not written
    cache.commit("r", 4)
    assert len(cache.nodes("r")) == 3
    cache.finish("r")


def test_in_flight_blocks_are_matchable_and_copied_only_after_their_step() -> None:
    cache = manager(8, 8, "write_through")
    cache.match_prefix("r", prompt("ab!"))
    cache.allocate("r", 3)
    cache.commit("r", 2, in_flight=True)
    assert cached(cache, "ab") == []
    assert not cache.take_swap_step().evict
    assert cached(cache, "ab") == ["swap_to_host", "swap_to_host"]
    assert pairs(cache.take_swap_step().evict) == [(0, 0), (1, 1)]
    cache.match_prefix("s", prompt("xy!"))
    cache.allocate("s", 3)
    cache.commit("s", 2, in_flight=True)
    cache.finish("s")  # aborted before its step: never computed
    cache.take_swap_step()
    assert cached(cache, "xy") == []


def test_the_duplicate_of_a_block_stays_private() -> None:
    cache = manager(8)
    for name in ("one", "two"):
        cache.match_prefix(name, prompt("ab!"))
        cache.allocate(name, 3)
    cache.take_swap_step()
    cache.commit("one", 2)
    cache.commit("two", 2)
    assert cache.block_table("one") != cache.block_table("two")
    assert cache.stats().counters.duplicate_blocks == 2
    cache.check()
    cache.finish("one")
    cache.finish("two")
    assert cache.num_free_device_blocks == 6
    cache.check_idle()


def test_contract_breaches_change_nothing() -> None:
    cache = manager(4)
    cache.match_prefix("r", prompt("ab!"))
    with pytest.raises(CacheStateError, match="already"):
        cache.match_prefix("r", prompt("ab!"))
    with pytest.raises(CacheStateError, match="fewer allocated"):
        cache.commit("r", 1)
    cache.allocate("r", 2)
    with pytest.raises(CacheStateError, match="take_swap_step"):
        cache.commit("r", 1)
    cache.take_swap_step()
    with pytest.raises(CacheStateError, match="fewer allocated"):
        cache.commit("r", 3)
    cache.commit("r", 1)
    with pytest.raises(CacheStateError, match="computed blocks"):
        cache.release("r")
    with pytest.raises(UnknownRequestError):
        cache.allocate("nobody", 1)
    cache.check()
    cache.finish("r")
    cache.check_idle()


def test_allocate_must_cover_the_matched_prefix() -> None:
    cache = manager(4)
    run(cache, "abc!")
    cache.match_prefix("r", prompt("abc!"))
    with pytest.raises(CacheStateError, match="cached prefix"):
        cache.allocate("r", 2)
    cache.release("r")


def test_without_prefix_caching_nothing_is_ever_found() -> None:
    cache = CacheManager(KVCacheConfig(4, 4, block_size=1, enable_prefix_caching=False))
    run(cache, "ab!")
    assert cached(cache, "ab") == []
    assert cache.num_free_device_blocks == 4


def test_reset_while_requests_run() -> None:
    cache = manager(8, 8)
    run(cache, "ab!")
    cache.match_prefix("running", prompt("abcd!"))
    cache.allocate("running", 5)
    cache.take_swap_step()
    cache.match_prefix("waiting", prompt("ab!"))
    cache.reset_cache()
    cache.check()
    assert cached(cache, "ab") == []
    assert [event.kind for event in cache.take_events()] == ["cleared"]
    result = cache.allocate("waiting", 3)  # its match is void: it computes everything itself
    assert isinstance(result, Allocation)
    assert result.num_cached_tokens == 0
    cache.take_swap_step()
    cache.commit("running", 4)  # computed on blocks from before the reset: never to be found
    cache.commit("waiting", 2)
    cache.finish("running")
    assert cached(cache, "abcd") == ["device", "device"]
    cache.finish("waiting")
    cache.check_idle()


def test_forced_reset_frees_everything() -> None:
    cache = manager(3, 3)
    run(cache, "abc!")
    cache.match_prefix("r", prompt("xy!"))
    cache.allocate("r", 2)  # opens an eviction
    cache.reset_cache(force=True)
    stats = cache.stats()
    assert (stats.num_requests, stats.device_free_blocks, stats.host_free_blocks) == (0, 3, 3)
    assert not cache.take_swap_step()
    cache.check_idle()


def test_resize() -> None:
    cache = manager(4, 4)
    run(cache, "abcd!")
    cache.resize_device_pool(2)
    assert cached(cache, "abcd") == ["device", "device"]
    cache.resize_device_pool(6)
    cache.match_prefix("r", prompt("123456!"))
    cache.allocate("r", 6)
    before = cache.stats()
    with pytest.raises(PoolInUseError, match="in use"):
        cache.resize_device_pool(5)
    with pytest.raises(ConfigError, match="at least 1"):
        cache.resize_device_pool(0)
    assert cache.stats() == before
    cache.check()


def test_shrinking_waits_for_blocks_that_are_still_to_be_copied_out() -> None:
    cache = manager(4, 4)
    run(cache, "abcd!")
    cache.match_prefix("r", prompt("1!"))
    cache.allocate("r", 1)  # evicts d from slot 3, whose copy is not handed over yet
    cache.release("r")
    with pytest.raises(PoolInUseError):
        cache.resize_device_pool(3)
    cache.take_swap_step()
    cache.resize_device_pool(3)
    cache.check()


def test_a_failed_swap_in_names_the_requests_and_forgets_the_blocks() -> None:
    cache = manager(4, 4)
    run(cache, "abc!")
    run(cache, "1234!")
    cache.match_prefix("r", prompt("abc!"))
    cache.allocate("r", 3)
    step = cache.take_swap_step()
    slots = (step.swap_in.target_slots[1],)
    result = TransferResult(step.step, CacheLevel.HOST, CacheLevel.DEVICE, 1, 0, 0.0, slots, "injected")
    assert cache.transfer_failed(result) == ["r"]
    assert [node.status for node in cache.nodes("r")][1:] == [CacheStatus.DELETING] * 2
    cache.check()
    cache.commit("r", 3)  # ignored
    cache.preempt("r")
    assert cached(cache, "abc") == ["device"]
    cache.take_swap_step()
    cache.check_idle()


def test_a_failed_backup_forgets_only_the_host_copy() -> None:
    cache = manager(4, 4, "write_through")
    run(cache, "ab!")
    step = cache.take_swap_step()
    result = TransferResult(
        step.step, CacheLevel.DEVICE, CacheLevel.HOST, 2, 0, 0.0, step.evict.target_slots, "injected"
    )
    assert cache.transfer_failed(result) == []
    assert cached(cache, "ab") == ["device", "device"]
    assert cache.stats().host_free_blocks == 4


def test_events_tell_an_outside_index_everything() -> None:
    cache = manager(2, 2, "write_back")
    run(cache, "ab!")
    stored = cache.take_events()
    assert [(event.kind, event.level, len(event.hashes), event.parent) for event in stored] == [
        ("stored", CacheLevel.DEVICE, 2, None)
    ]
    cache.match_prefix("r", prompt("x!"))
    cache.allocate("r", 1)
    assert [(event.kind, event.level, event.hashes) for event in cache.take_events()] == [
        ("removed", CacheLevel.DEVICE, (BlockHash(b"ab"),))
    ]
    cache.take_swap_step()  # only now is the host copy there
    assert [(event.kind, event.level, event.parent) for event in cache.take_events()] == [
        ("stored", CacheLevel.HOST, BlockHash(b"a"))
    ]


def test_too_many_events_collapse_into_a_snapshot() -> None:
    cache = manager(8, 0, max_queued_events=2)
    for text in ("a!", "b!", "c!", "d!"):
        run(cache, text)
    events = cache.take_events()
    assert events[0].kind == "cleared"
    assert {event.hashes[0] for event in events[1:]} == {BlockHash(text.encode()) for text in "abcd"}
    assert cache.stats().events_overflowed == 1
    assert cache.take_events() == []


def test_many_threads() -> None:
    cache = manager(64, 64, "write_through")
    failures: list[BaseException] = []

    def worker(number: int) -> None:
        try:
            for turn in range(150):
                name = f"{number}/{turn}"
                text = "abcdefgh"[: 2 + (turn + number) % 6] + str(number % 3) + "!"
                cache.match_prefix(name, prompt(text))
                if isinstance(cache.allocate(name, len(text)), NoSpace):
                    cache.release(name)
                    continue
                cache.commit(name, len(text) - 1, in_flight=True)
                cache.take_swap_step()
                cache.finish(name)
                cache.stats()
                if turn % 50 == 49:
                    cache.reset_cache()
                    cache.check()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=worker, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    cache.take_swap_step()
    cache.check_idle()


def lru_reference(order: Sequence[str], kept: int) -> set[str]:
    """Blocks that survive when the leaf-first least recently used ones are evicted down to `kept`."""
    recency: dict[str, tuple[int, int]] = {}
    for time, text in enumerate(order):
        for depth in range(1, len(text) + 1):
            recency[text[:depth]] = (time, -depth)
    return set(sorted(recency, key=lambda block: recency[block])[len(recency) - kept :])


@pytest.mark.parametrize(
    "order", [["abcd", "abxy", "ab", "q", "abc"], ["a", "ab", "abc", "abcd", "x", "ab"], ["pq", "pr", "ps", "p", "pq"]]
)
def test_eviction_order_against_a_sorted_list(order: list[str]) -> None:
    blocks = {text[:depth] for text in order for depth in range(1, len(text) + 1)}
    for kept in range(len(blocks) + 1):
        cache = manager(len(blocks))
        for turn, text in enumerate(order):
            run(cache, text + "!", f"{turn}")
        if evicted := len(blocks) - kept:
            cache.match_prefix("filler", prompt("#" * evicted + "!"))
            assert isinstance(cache.allocate("filler", evicted), Allocation)
        found = {text[:depth] for text in order for depth in range(1, len(cached(cache, text)) + 1)}
        assert found == lru_reference(order, kept), kept


def test_what_an_earlier_step_computed_can_be_committed_while_the_next_one_is_decided() -> None:
    cache = manager(8)
    cache.match_prefix("r", prompt("abcd!"))
    cache.allocate("r", 2)
    cache.take_swap_step()
    cache.allocate("r", 4)  # the engine plans ahead of the results
    cache.commit("r", 2)
    assert cached(cache, "ab") == ["device"] * 2
    with pytest.raises(CacheStateError, match="take_swap_step"):
        cache.commit("r", 3)
    cache.take_swap_step()
    cache.commit("r", 4)
    assert cached(cache, "abcd") == ["device"] * 4
    cache.finish("r")
    cache.check_idle()


def test_fewer_tokens_in_flight_than_before_are_ignored() -> None:
    cache = manager(8)
    cache.match_prefix("r", prompt("abc!"))
    cache.allocate("r", 3)
    cache.commit("r", 3, in_flight=True)
    cache.commit("r", 1, in_flight=True)
    cache.take_swap_step()
    assert cached(cache, "abc") == ["device"] * 3
    cache.finish("r")


def test_no_counter_ever_falls() -> None:
    cache = manager(8, 8)
    run(cache, "abc!")
    seen = []
    for end in (cache.release, cache.finish, cache.preempt):
        for stepped in (False, True):
            cache.match_prefix("r", prompt("abc1!"))
            assert isinstance(cache.allocate("r", 5), Allocation)
            seen.append(cache.stats().counters)
            if stepped:
                cache.take_swap_step()
            seen.append(cache.stats().counters)
            end("r")
            seen.append(cache.stats().counters)
            cache.take_swap_step()
    for before, after in pairwise(seen):
        assert all(value <= getattr(after, name) for name, value in asdict(before).items())
    # Admitted: the first run, the release that came too late, and both ways to end a request, twice each.
    counters = seen[-1]
    assert (counters.requests_admitted, counters.requests_rolled_back) == (6, 2)
    assert counters.device_hit_tokens == 5 * 3
    assert counters.query_tokens == 4 + 5 * 5


def test_a_backup_without_room_is_counted_once_not_at_every_commit() -> None:
    cache = manager(20, 2, "write_through")
    cache.match_prefix("r", prompt("abcdefghij!"))
    for tokens in range(1, 11):
        cache.allocate("r", tokens)
        cache.take_swap_step()
        cache.commit("r", tokens)
    assert cache.stats().counters.backup_skipped_blocks == 8
    cache.finish("r")


def test_the_first_of_many_children_is_not_preferred_by_eviction() -> None:
    cache = manager(8, 0)
    for text in ("sa!", "sb!", "sc!", "sd!"):
        run(cache, text)
    run(cache, "sa!", "again")
    run(cache, "1234!")
    assert [cached(cache, text) == ["device"] * 2 for text in ("sa", "sb", "sc", "sd")] == [True, False, True, True]


def test_a_smaller_allocation_takes_nothing_back() -> None:
    cache = manager(8)
    cache.match_prefix("r", prompt("abcd!"))
    for tokens in (4, 2):
        cache.allocate("r", tokens)
        cache.take_swap_step()
    cache.allocate("r", 6)
    cache.commit("r", 4)  # allocated in the first step
    assert cached(cache, "abcd") == ["device"] * 4
    cache.finish("r")


def test_a_run_that_fits_the_host_only_in_part_is_counted_once() -> None:
    cache = manager(4, 1)
    run(cache, "abcd!")
    run(cache, "12!")
    assert cached(cache, "abcd") == ["device", "device", "host"]
    counters = cache.stats().counters
    assert (counters.device_evicted_blocks, counters.device_lost_blocks, counters.backup_skipped_blocks) == (2, 1, 1)


def test_a_request_that_ran_through_a_reset_caches_nothing() -> None:
    cache = manager(8)
    cache.match_prefix("r", prompt("ab!"))
    cache.allocate("r", 2)
    cache.take_swap_step()
    cache.reset_cache()
    cache.commit("r", 2)
    assert cached(cache, "ab") == []
    cache.finish("r")
    cache.check_idle()


def test_nothing_is_cached_below_a_block_that_was_lost() -> None:
    cache = manager(6, 4)
    run(cache, "abc!")
    run(cache, "123456!")
    cache.match_prefix("r", prompt("abcde!"))
    cache.allocate("r", 5)
    step = cache.take_swap_step()
    slots = step.swap_in.target_slots[2:]
    failed = TransferResult(step.step, CacheLevel.HOST, CacheLevel.DEVICE, 1, 0, 0.0, slots, "injected")
    assert cache.transfer_failed(failed) == ["r"]
    cache.commit("r", 5)
    cache.check()
    assert cached(cache, "abcde") == ["device", "device"]
    cache.finish("r")


def test_a_planned_swap_in_whose_source_was_never_filled_is_lost() -> None:
    cache = manager(3, 6)
    run(cache, "abc!")
    step = run(cache, "123!")
    cache.match_prefix("r", prompt("abc!"))
    cache.allocate("r", 3)
    slots = step.evict.target_slots
    failed = TransferResult(step.step, CacheLevel.DEVICE, CacheLevel.HOST, 3, 0, 0.0, slots, "injected")
    cache.take_events()
    assert cache.transfer_failed(failed) == ["r"]
    removed = cache.take_events()  # its device copy had never been announced
    assert [(event.kind, event.level, event.hashes[-1]) for event in removed] == [
        ("removed", CacheLevel.HOST, BlockHash(b"abc"))
    ]
    cache.preempt("r")
    assert not cache.take_swap_step().swap_in
    assert cached(cache, "abc") == []
    cache.check_idle()
