"""The life of a request: what each call does, refuses, counts and undoes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import pairwise

import pytest

from fastdeploy_kvcache_v1.config import KVCacheConfig, WritePolicy
from fastdeploy_kvcache_v1.contract.messages import Allocation, NoSpace
from fastdeploy_kvcache_v1.errors import BlockPoolError, CacheStateError, UnknownRequestError
from fastdeploy_kvcache_v1.scheduler.block_hashing import BlockHasher, GivenHashes
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager

from .scenario import manager, play, play_law, prompt

SCENARIOS = {
    "the duplicate of a block stays private": (
        "8+0: start ab one; start ab two; step; commit one 2; commit two 2; count duplicate_blocks 2; table one 0 1;"
        "table two 2 3; finish one; finish two; count device_free_blocks 6; idle"
    ),
    "what an earlier step computed can be committed while the next one is decided": (
        "8+0: match abcd r; grow r 2; step; grow r 4; commit r 2; see ab DD; step; commit r 4; see abcd DDDD; finish r;"
        "idle"
    ),
    "fewer tokens than before are ignored": "8+0: start abc r; step; commit r 3; commit r 1; see abc DDD; finish r",
    "a smaller allocation takes nothing back": (
        "8+0: match abcd r; grow r 4; step; grow r 2; step; grow r 6; commit r 4; see abcd DDDD; finish r; idle"
    ),
    # ---- slots lent to a scheduler that keeps its own block tables
    "lent slots belong to the borrower": (
        "6+0: lend 4; refuse 3; are_lent 0 1 2 3; count device_cached_blocks 0; back; idle"
    ),
    "a refused loan lends nothing": "6+0: refuse 7; are_lent; idle",
    "lending evicts": "6+0: run abc; count device_free_blocks 3; lend 6; see abc -",
    "adopted slots are given back with the request": (
        "6+0: run abc; start abc r 3+0; lend 2; adopt r 3; are_lent 4; table r 0 1 2 3; preempt r;"
        "count device_free_blocks 2; back; idle"
    ),
    "adopted blocks are cached, and as a duplicate where another request was first": (
        "6+0: start a one; match a two; grow two 0; lend 1; adopt two 1; step; commit one 1; commit two 1; see a D;"
        "count duplicate_blocks 1; finish one; finish two; count device_free_blocks 5; idle"
    ),
    "lent slots hold the pool open until a forced reset": (
        "6+0: lend 6; stuck 5; reset forced; are_lent; resize 5; idle"
    ),
}


@pytest.mark.parametrize("law", SCENARIOS)
def test_law_of_a_request(law: str) -> None:
    play_law(SCENARIOS[law])


def test_a_second_end_is_an_error_that_takes_no_other_requests_blocks() -> None:
    cache = play("start ab one; finish one; start xy two", 4).cache
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
    assert cache.num_cached("r") == 3


REFUSALS = [
    # events, call, its arguments, what is said
    ("match ab r", CacheManager.match_prefix, ("r", prompt("ab!")), "already"),
    ("match ab r", CacheManager.commit, ("r", 1), "committed, room for"),
    ("match ab r; grow r 2", CacheManager.commit, ("r", 1), "take_swap_step"),
    ("match ab r; grow r 2; step", CacheManager.commit, ("r", 3), "committed, room for"),
    ("match ab r; grow r 2; step; commit r 1", CacheManager.release, ("r",), "computed blocks"),
    ("match abcd r; grow r 2; step; grow r 4; commit r 2", CacheManager.commit, ("r", 3), "take_swap_step"),
    ("run abc; match abc r", CacheManager.allocate, ("r", 2), "cached prefix"),
    (
        "match abcde r; grow r 0; lend 3; adopt r 0 1 2; step; grow r 4",
        CacheManager.commit,
        ("r", 4),
        "closed its step",
    ),
    ("match ab r; lend 1", CacheManager.adopt, ("r", [0]), "allocate first"),
]


@pytest.mark.parametrize(("events", "call", "arguments", "said"), REFUSALS)
def test_contract_breaches_change_nothing(events: str, call, arguments, said: str) -> None:  # type: ignore[no-untyped-def]
    cache = play(events, 6).cache
    before = cache.stats()
    with pytest.raises(CacheStateError, match=said):
        call(cache, *arguments)
    assert cache.stats() == before
    cache.check()


@pytest.mark.parametrize("call", [CacheManager.allocate, CacheManager.commit, CacheManager.adopt])
def test_unknown_requests_are_refused(call) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UnknownRequestError):
        call(manager(4), "unknown", [0] if call is CacheManager.adopt else 1)


@pytest.mark.parametrize("wrong", [[4], [0, 0], [0, 4]])
def test_only_lent_slots_come_back(wrong: list[int]) -> None:
    cache = play("lend 2; start ab r", 6).cache
    for refuse in (lambda: cache.take_back(wrong), lambda: cache.adopt("r", wrong)):  # type: ignore[arg-type]
        with pytest.raises(BlockPoolError):
            refuse()
    assert cache.lent_slots() == {0, 1}
    cache.check()


def test_a_match_can_be_cut_short() -> None:
    cache = play("run abc", 6).cache
    assert cache.match_prefix("r", prompt("abc!"), max_blocks=2).num_blocks == 2
    cache.check()
    cache.release("r")
    assert cache.match_prefix("r", prompt("abc!"), max_blocks=9).num_blocks == 3


def test_without_prefix_caching_nothing_is_ever_found() -> None:
    play("run ab; see ab -; count device_free_blocks 4", 4, 4, enable_prefix_caching=False)


def test_a_sequence_may_have_fewer_hashes_than_full_blocks() -> None:
    cache = play("run abc", 8).cache
    assert cache.match_prefix("r", GivenHashes(prompt("ab").hashes, 6)).num_blocks == 2
    assert isinstance(cache.allocate("r", 5), Allocation)
    cache.take_swap_step()
    with pytest.raises(CacheStateError, match=r"committed, \d+ hashed"):
        cache.commit("r", 5)


def test_many_threads() -> None:
    cache = manager(64, 64, "write_through")

    def serve(number: int) -> None:
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
            if turn % 50 == 49:
                cache.reset_cache()
                cache.check()

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(serve, range(6)))
    cache.take_swap_step()
    cache.check_idle()


def test_no_counter_ever_falls() -> None:
    scene = play("run abc", 8, 8)
    cache, seen = scene.cache, []
    for end in (cache.release, cache.finish, cache.preempt):
        for stepped in (False, True):
            scene.play("match abc1 r; grow r 5")
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
    scene.hits("6", "15", "0", "29")
    counters = seen[-1]
    ended = counters.requests_rolled_back, counters.requests_finished, counters.requests_preempted
    assert ended == (2, 3, 2)


def test_shared_prefills_that_hosts_report_are_added_up() -> None:
    scene = play("step", 4)
    for tokens in (3, 4):
        scene.cache.count_shared_prefill(tokens)
    scene.play("count shared_prefill_requests 2; count shared_prefill_tokens 7")


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
