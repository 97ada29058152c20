"""Which blocks of a request the batch computes for another one, and whether they are worth a batch of waiting."""

from __future__ import annotations

import pytest

from fastdeploy_kvcache_v1.contract.messages import Allocation, CacheLevel
from fastdeploy_kvcache_v1.scheduler.block_hashing import GivenHashes
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager
from fastdeploy_kvcache_v1.scheduler.open_prefills import MOST_LOOKED_AT, OpenPrefills

from .scenario import fail, manager, prompt, run


def computing(text: str, *, worth: int = 1) -> OpenPrefills:
    prefills = OpenPrefills(block_size=1, worth_tokens=worth)
    prefills.compute("leader", prompt(text).hashes)
    return prefills


@pytest.mark.parametrize(
    ("text", "num_cached", "expected"),
    [("abcdX!", 0, 4), ("abXY!", 0, 2), ("Xbcd!", 0, 0), ("abcd!", 2, 2), ("abcd!", 4, 0), ("ab", 0, 1)],
)
def test_shared_blocks_lie_between_the_cached_ones_and_the_last_token(
    text: str, num_cached: int, expected: int
) -> None:
    assert computing("abcd").to_wait_for(prompt(text), num_cached, []) == expected


def test_blocks_before_the_cached_ones_of_the_leader_are_not_computed() -> None:
    prefills = OpenPrefills(1, 1)
    prefills.compute("leader", prompt("abcd").hashes[2:])
    assert prefills.to_wait_for(prompt("abcd!"), 0, []) == 0, "its cached prefix is gone: nobody computes that now"


def test_a_short_prefix_is_not_worth_a_batch() -> None:
    prefills = computing("abcd", worth=3)
    assert [prefills.to_wait_for(prompt(text), 0, []) for text in ("ab!", "abc!")] == [0, 3]


@pytest.mark.parametrize(("worth", "expected"), [(6, 3), (7, 0)])
def test_waiting_saves_the_tokens_of_shared_blocks_except_the_last_token(worth: int, expected: int) -> None:
    prefills, hashes = OpenPrefills(block_size=2, worth_tokens=worth), prompt("abcd").hashes
    prefills.compute("leader", hashes)
    assert prefills.to_wait_for(GivenHashes(hashes, 8), 0, []) == expected


def test_savings_of_all_waiting_requests_count() -> None:
    prefills = computing("abcd", worth=3)
    follower, other, stranger = prompt("ab!"), prompt("aX!"), prompt("XY!")
    assert prefills.to_wait_for(follower, 0, [stranger, other]) == 2
    assert prefills.to_wait_for(follower, 0, [stranger]) == 0
    assert prefills.to_wait_for(follower, 0, [stranger] * MOST_LOOKED_AT + [other]) == 0, "not in sight"


def test_new_batch_and_batch_that_the_leader_left_share_no_blocks() -> None:
    for end in (OpenPrefills.begin, lambda prefills: prefills.give_up("leader")):
        prefills = computing("abcd")
        end(prefills)
        assert prefills.to_wait_for(prompt("abcd!"), 0, []) == 0
    prefills.give_up("leader")  # a second time


# ---- the manager's answer: what commit would make matchable


def admit(cache: CacheManager, text: str) -> None:
    cache.match_prefix(text, prompt(text))
    assert isinstance(cache.allocate(text, len(text)), Allocation)


def test_uncommitted_blocks_become_matchable_with_their_commit() -> None:
    cache = manager(8)
    run(cache, "ab!")
    admit(cache, "abcd")
    promised = cache.uncommitted("abcd", 3)
    assert promised == prompt("abcd").hashes[2:3]
    cache.take_swap_step()
    cache.commit("abcd", 3)
    assert cache.count_cached(prompt("abcd").hashes) == 3
    assert cache.uncommitted("abcd", 3) == []


def test_nothing_is_promised_that_can_never_be_matched() -> None:
    off = manager(8, enable_prefix_caching=False)
    admit(off, "abcd")
    assert not off.uncommitted("abcd", 4)
    cache = manager(8)
    admit(cache, "abcd")
    assert len(cache.uncommitted("abcd", 4)) == 4
    cache.reset_cache()
    assert not cache.uncommitted("abcd", 4), "a reset"
    cache = manager(3, 4)
    for text in ("xy!", "123!"):
        run(cache, text)
    admit(cache, "xyz")
    assert len(cache.uncommitted("xyz", 3)) == 1
    step = cache.take_swap_step()
    assert fail(cache, step, CacheLevel.DEVICE, step.swap_in.target_slots) == ["xyz"]
    assert not cache.uncommitted("xyz", 3), "a copy below it that failed"
