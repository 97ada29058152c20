"""Reset, resize and the events for outside indexes."""

from __future__ import annotations

import pytest

from fastdeploy_kvcache_v1.errors import ConfigError, PoolInUseError
from fastdeploy_kvcache_v1.metadata import Allocation, BlockHash, CacheLevel, NoSpace

from .scenario import cached, manager, prompt, run, start


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


def test_events_tell_an_outside_index_everything() -> None:
    cache = manager(2, 2, "write_back")
    assert [event.kind for event in cache.take_events()] == ["cleared"]
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


def test_events_are_kept_from_the_first_time_they_are_taken() -> None:
    cache = manager(8, max_queued_events=2)
    for text in ("a!", "bc!", "d!"):
        run(cache, text)
    cache.reset_cache()
    run(cache, "ef!")
    assert not cache._events._events
    assert [(event.kind, event.hashes) for event in cache.take_events()] == [
        ("cleared", ()),
        ("stored", (BlockHash(b"e"), BlockHash(b"ef"))),
    ]
    assert cache.stats().events_overflowed == 0
    run(cache, "g!")
    assert [event.kind for event in cache.take_events()] == ["stored"]


def test_no_event_is_ever_kept_with_a_limit_of_none() -> None:
    cache = manager(8, max_queued_events=0)
    for text in ("a!", "b!", "c!"):
        run(cache, text)
        assert cache.take_events() == []
        assert not cache._events._events
    assert cache.stats().events_overflowed == 0


def test_too_many_events_collapse_into_a_snapshot() -> None:
    cache = manager(8, 0, max_queued_events=2)
    cache.take_events()
    for text in ("a!", "b!", "c!", "d!"):
        run(cache, text)
    events = cache.take_events()
    assert events[0].kind == "cleared"
    assert {event.hashes[0] for event in events[1:]} == {BlockHash(text.encode()) for text in "abcd"}
    assert cache.stats().events_overflowed == 1
    assert cache.take_events() == []


@pytest.mark.parametrize(("host", "kept"), [(0, []), (4, ["host", "host"])])
def test_shrinking_clears_every_run_of_a_path_once(host: int, kept: list[str]) -> None:
    cache = manager(4, host, "write_through")
    run(cache, "x!")
    run(cache, "ab!")
    run(cache, "a!", "cut")
    cache.take_swap_step()
    cache.resize_device_pool(1)
    cache.check()
    assert (cached(cache, "x"), cached(cache, "ab")) == (["device"], kept)
    assert cache.stats().counters.device_evicted_blocks == 2


def test_a_snapshot_leaves_out_what_is_still_being_copied() -> None:
    cache = manager(8, 8, "write_through", max_queued_events=1)
    cache.take_events()
    run(cache, "ab!")  # two blocks: lost, and their host copies are open
    events = cache.take_events()
    assert [(event.kind, event.level) for event in events] == [("cleared", None), ("stored", CacheLevel.DEVICE)]


def test_refused_allocations_are_counted() -> None:
    cache = manager(2)
    start(cache, "ab!")
    cache.match_prefix("r", prompt("12!"))
    assert isinstance(cache.allocate("r", 2), NoSpace)
    assert isinstance(cache.lend(1), NoSpace)
    assert cache.stats().counters.allocations_refused == 2
