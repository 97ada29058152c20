"""The events for outside indexes, and sizes that are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fastdeploy_kvcache_v1.contract.messages import CacheLevel
from fastdeploy_kvcache_v1.errors import ConfigError, PoolInUseError
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager

from .scenario import block, play


def test_sizes_that_cannot_be_are_refused() -> None:
    cache = play("start ab", 4).cache
    with pytest.raises(ConfigError, match="at least 1"):
        cache.resize_device_pool(0)
    with pytest.raises(PoolInUseError, match="in use"):
        cache.resize_device_pool(1)


def news(cache: CacheManager) -> list[tuple[object, ...]]:
    """Kind, tier, last block of each event, and the block above."""
    return [
        (event.kind, event.level, event.hashes[-1] if event.hashes else None, event.parent)
        for event in cache.take_events()
    ]


def test_events_tell_an_outside_index_everything() -> None:
    scene = play("step", 2, 2)
    assert news(scene.cache) == [("cleared", None, None, None)]
    scene.run("ab")
    assert news(scene.cache) == [("stored", CacheLevel.DEVICE, block("ab"), None)]
    scene.start("x")
    assert news(scene.cache) == [("removed", CacheLevel.DEVICE, block("ab"), None)]
    scene.step()  # only now is the host copy there
    assert news(scene.cache) == [("stored", CacheLevel.HOST, block("ab"), block("a"))]
    scene.reset()
    assert news(scene.cache) == [("cleared", None, None, None)]


def test_events_tell_of_blocks_that_are_lost_with_one_above_them() -> None:
    scene = play("run abc; run 12345678; start abcde r; step late; commit r 5; finish r", 8, 16)
    scene.cache.take_events()
    scene.fail("late", "device", "0")
    assert ("removed", CacheLevel.DEVICE, block("abcde"), None) in news(scene.cache)


def test_events_name_the_last_blocks_of_a_run_when_only_they_leave() -> None:
    scene = play("run abcd", 4)
    scene.cache.take_events()
    scene.run("12")
    removed = [event.hashes for event in scene.cache.take_events() if event.kind == "removed"]
    assert removed == [(block("abc"), block("abcd"))]
    scene.play("count device_evicted_blocks 2; count device_lost_blocks 2")


def test_events_are_kept_from_the_first_time_they_are_taken() -> None:
    scene = play("run a; run bc; run d; reset; run ef", 8, max_queued_events=2)
    assert not scene.cache._events._events
    assert [(event.kind, event.hashes) for event in scene.cache.take_events()] == [
        ("cleared", ()),
        ("stored", (block("e"), block("ef"))),
    ]
    scene.play("count events_overflowed 0; run g")
    assert [event.kind for event in scene.cache.take_events()] == ["stored"]


def test_no_event_is_kept_with_a_limit_of_0() -> None:
    scene = play("step", 8, max_queued_events=0)
    for text in "abc":
        scene.run(text)
        assert scene.cache.take_events() == []
        assert not scene.cache._events._events
    scene.count("events_overflowed", "0")


OVERFLOWS = [
    # host blocks, most blocks named, events, overflows, kinds
    (0, 2, "run a; run b; run c; run d", 1, ["cleared", "stored", "stored", "stored", "stored"]),
    (0, 10, "run abc; run defghijklmn", 1, ["cleared", "stored", "stored"]),  # one event, eleven blocks
    (0, 10, "run abcdefghij", 0, ["stored"]),
    (8, 1, "run ab", 1, ["cleared", "stored"]),  # their host copies are still open: a snapshot leaves them out
]


@pytest.mark.parametrize(("host", "most", "events", "overflows", "kinds"), OVERFLOWS)
def test_too_many_named_blocks_collapse_into_a_snapshot(
    host: int, most: int, events: str, overflows: int, kinds: list[str]
) -> None:
    scene = play("step", 64, host, "write_through", max_queued_events=most)
    scene.cache.take_events()
    scene.play(f"{events}; count events_overflowed {overflows}")
    assert [event.kind for event in scene.cache.take_events()] == kinds
    assert scene.cache.take_events() == []


@pytest.mark.parametrize("empty", [CacheManager.take_events, CacheManager.reset_cache])
def test_the_bound_on_events_starts_anew_when_the_queue_is_emptied(empty: Callable[[CacheManager], object]) -> None:
    scene = play("step", 64, max_queued_events=10)
    scene.cache.take_events()
    for text in ("abcdefghij", "klmnopqrst"):  # as many blocks as the bound, each time
        scene.run(text)
        empty(scene.cache)
    scene.count("events_overflowed", "0")
