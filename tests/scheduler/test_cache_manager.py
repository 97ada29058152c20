"""The life of a request: what each call does, refuses, counts and undoes."""

from __future__ import annotations

import threading
from dataclasses import asdict
from itertools import pairwise

import pytest

from fastdeploy_kvcache_v1.config import KVCacheConfig, WritePolicy
from fastdeploy_kvcache_v1.errors import CacheStateError, UnknownRequestError
from fastdeploy_kvcache_v1.metadata import Allocation, NoSpace
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager
from fastdeploy_kvcache_v1.scheduler.cache_utils import BlockHasher, GivenHashes

from .scenario import cached, manager, prompt, run


def test_a_match_that_cannot_be_admitted_can_be_retried_forever() -> None:
    cache = manager(4, 4)
    run(cache, "abc!")
    cache.match_prefix("holder", prompt("xy!"))
    assert isinstance(cache.allocate("holder", 2), Allocation)
    cache.match_prefix("look", prompt("abc!"))
    before = [(node.hash, node.pins, node.hits) for node in cache.nodes("look")]
    cache.release("look")
    stats = cache.stats()
    for attempt in range(1000):
        cache.match_prefix("big", prompt("abc456!"))
        assert isinstance(cache.allocate("big", 6), NoSpace)
        if attempt % 2:
            assert isinstance(cache.allocate("big", 7), NoSpace)
        cache.release("big")
    cache.match_prefix("look", prompt("abc!"))
    after = [(node.hash, node.pins, node.hits) for node in cache.nodes("look")]
    cache.release("look")
    assert after == before
    assert cache.stats().device_evictable_blocks == stats.device_evictable_blocks
    cache.finish("holder")
    cache.take_swap_step()
    cache.check_idle()


def test_a_second_finish_is_an_error_that_takes_no_other_requests_blocks() -> None:
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
    with pytest.raises(CacheStateError, match="committed, room for"):
        cache.commit("r", 1)
    cache.allocate("r", 2)
    with pytest.raises(CacheStateError, match="take_swap_step"):
        cache.commit("r", 1)
    cache.take_swap_step()
    with pytest.raises(CacheStateError, match="committed, room for"):
        cache.commit("r", 3)
    cache.commit("r", 1)
    with pytest.raises(CacheStateError, match="computed blocks"):
        cache.release("r")
    with pytest.raises(UnknownRequestError):
        cache.allocate("unknown", 1)
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
                cache.take_swap_step()
                cache.commit(name, len(text) - 1)
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


def test_fewer_tokens_than_before_are_ignored() -> None:
    cache = manager(8)
    cache.match_prefix("r", prompt("abc!"))
    cache.allocate("r", 3)
    cache.take_swap_step()
    cache.commit("r", 3)
    cache.commit("r", 1)
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
    assert (counters.requests_finished, counters.requests_preempted) == (3, 2)
    assert counters.device_hit_tokens == 5 * 3
    assert counters.query_tokens == 4 + 5 * 5


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


def test_a_sequence_may_have_fewer_hashes_than_full_blocks() -> None:
    cache = manager(8)
    run(cache, "abc!")
    found = cache.match_prefix("r", GivenHashes(prompt("ab").hashes, 6))
    assert found.num_blocks == 2
    assert isinstance(cache.allocate("r", 5), Allocation)
    cache.take_swap_step()
    with pytest.raises(CacheStateError, match=r"committed, \d+ hashed"):
        cache.commit("r", 5)
    cache.finish("r")


def test_host_hits_are_reported_in_tokens_and_once() -> None:
    cache = CacheManager(KVCacheConfig(4, 4, block_size=2, write_policy=WritePolicy.WRITE_BACK))
    prompts = [BlockHasher(2), BlockHasher(2)]
    for number, hasher in enumerate(prompts):
        hasher.extend([number] * 7)
    for name, hasher in (("a", prompts[0]), ("b", prompts[1]), ("a again", prompts[0])):
        cache.match_prefix(name, hasher)
        first = cache.allocate(name, 6)
        second = cache.allocate(name, 7)
        assert isinstance(first, Allocation)
        assert isinstance(second, Allocation)
        assert (second.num_device_tokens, second.num_host_tokens) == (0, 0)
        cache.take_swap_step()
        cache.commit(name, 6)
        cache.finish(name)
    assert (first.num_device_tokens, first.num_host_tokens) == (0, 6)
    counters = cache.stats().counters
    assert (counters.query_tokens, counters.device_hit_tokens, counters.host_hit_tokens) == (21, 0, 6)
