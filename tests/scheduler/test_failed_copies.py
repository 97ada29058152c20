"""A copy failed in the worker: what it was to fill is forgotten, and nothing else."""

from __future__ import annotations

import pytest

from fastdeploy_kvcache_v1.metadata import Allocation, BlockHash, CacheLevel, CacheStatus, TransferResult

from .scenario import cached, fail, manager, on_host, prompt, run, start


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
    assert cache.stats().counters.failed_transfer_blocks == 2


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
    before = cache.stats().counters
    assert cache.transfer_failed(failed) == ["r"]
    removed = cache.take_events()  # its device copy had never been announced
    assert [(event.kind, event.level, event.hashes[-1]) for event in removed] == [
        ("removed", CacheLevel.HOST, BlockHash(b"abc"))
    ]
    cache.preempt("r")
    counters = cache.stats().counters
    assert (counters.requests_admitted, counters.host_hit_tokens) == (before.requests_admitted, before.host_hit_tokens)
    assert not cache.take_swap_step().swap_in
    assert cached(cache, "abc") == []
    cache.check_idle()


def test_a_late_report_does_not_touch_a_block_whose_copy_into_that_slot_is_still_to_be_made() -> None:
    cache = manager(4, 1, "write_through")
    run(cache, "a!")
    late = cache.take_swap_step()
    run(cache, "b!")  # its copy goes into the slot that `a` had
    assert fail(cache, late, CacheLevel.HOST, late.evict.target_slots) == []
    cache.check()
    assert cached(cache, "b") == ["swap_to_host"]
    cache.take_swap_step()
    assert on_host(cache, "b") == [True]


def test_a_match_that_waits_on_a_lost_block_becomes_empty_and_is_not_named() -> None:
    cache = manager(4, 4)
    run(cache, "ab!")
    step = run(cache, "1234!")
    cache.match_prefix("waits", prompt("ab!"))
    assert fail(cache, step, CacheLevel.HOST, step.evict.target_slots) == []
    assert cache.nodes("waits") == ()
    cache.check()
    result = cache.allocate("waits", 3)
    assert isinstance(result, Allocation)
    assert result.num_cached_tokens == 0
    cache.finish("waits")


@pytest.mark.parametrize("policy", ["write_back", "write_through", "auto"])
@pytest.mark.parametrize("failed", ["a", "c", "abc"])
@pytest.mark.parametrize("then", ["runs", "finished", "left the device", "was hit", "was matched"])
def test_after_a_report_that_comes_after_the_commit_nothing_of_it_is_found(policy: str, failed: str, then: str) -> None:
    """It comes too late for `r`, whose tokens were sampled from garbage; nobody else is to read that."""
    cache = manager(8, 16, policy)
    run(cache, "abc!")
    run(cache, "12345678!")
    start(cache, "abcde!", "r")
    step = cache.take_swap_step()
    cache.commit("r", 5)
    if then != "runs":
        cache.finish("r")
    if then == "left the device":
        cache.lend(5)
        cache.take_swap_step()
        assert cached(cache, "abcde") == ["device"] * 3 + ["host"] * 2
    elif then == "was hit":
        start(cache, "abcdef!", "other")
    elif then == "was matched":
        cache.match_prefix("other", prompt("abcdef!"))
    lost = [slot for letter, slot in zip("abc", step.swap_in.target_slots, strict=True) if letter in failed]
    named = fail(cache, step, CacheLevel.DEVICE, lost)
    assert named == {"runs": ["r"], "was hit": ["other"]}.get(then, [])
    cache.check()
    left = cached(cache, "abcde")
    assert left == ["device"] * "abc".index(failed[0])
    cache.take_swap_step()
    for name in named:
        cache.commit(name, 5)  # ignored
        cache.preempt(name)
    cache.check()
    assert cached(cache, "abcde") == left
