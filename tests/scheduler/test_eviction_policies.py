"""What every order of eviction keeps, and how one is chosen for a tier."""

from __future__ import annotations

import random

import pytest

from fastdeploy_kvcache_v1.config import KVCacheConfig, WritePolicy
from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager
from fastdeploy_kvcache_v1.scheduler.policies.backup import BACKUP_POLICIES
from fastdeploy_kvcache_v1.scheduler.policies.eviction import EVICTION_POLICIES

from .conftest import OTHER_POLICIES
from .scenario import cached, manager, on_host, play, run

ALL = list(EVICTION_POLICIES)


@pytest.mark.parametrize("order", ALL)
def test_blocks_that_waiting_requests_will_hit_are_evicted_last(order: str) -> None:
    events = "run xy; run ab; run ab; run cd; run cd; waiting xy; run 1234; see xy DD"
    play(f"{events}; waiting xy 1234; run 567890; see 567890 DDDDDD; idle", 6, eviction_policy=order)


@pytest.mark.parametrize("order", ["adaptive", "lru"])
def test_the_order_is_recency_while_nothing_is_known(order: str) -> None:
    play("run ab; run cd; run ef; see ab -; see cd DD; see ef DD", 4, eviction_policy=order)


@pytest.mark.parametrize("order", ALL)
def test_candidates_are_all_evictable_runs_and_depend_on_traffic_alone(order: str) -> None:
    found = []
    for _ in range(2):
        cache, dice = manager(9, 6, eviction_policy=order), random.Random(3)
        for number in range(60):
            run(cache, dice.choice(("ab!", "abc!", "cd!", "ef!", "gh!", "xyz!")), str(number))
        residency = cache._residency
        on_host = [*residency.host_duplicates, *residency.host_order.candidates()]
        orders = [list(residency.device_order.candidates()), on_host]
        assert set(orders[0]) == {each for each in cache._tree.runs() if each.on_device}
        assert set(orders[1]) == {each for each in cache._tree.runs() if each.host is not None}
        found.append(([[each.last_hash for each in order] for order in orders], cache.stats()))
    assert found[0] == found[1]


@pytest.mark.parametrize("order", [*ALL, *OTHER_POLICIES])
@pytest.mark.parametrize(("device", "host"), [(4, 0), (4, 8), (2, 4)])
def test_run_that_had_to_wait_can_be_evicted_when_the_reason_ends(order: str, device: int, host: int) -> None:
    searched = "match pc waits; run 1; release waits; match p waits; run 2; release waits; match pc waits; run 3"
    events = f"run pc; run x; run p; run y; {searched}; release waits; run p; lend {device}; step; back"
    play(f"{events}; resize 12; run abcdefghijkl; run ABCDEFGHIJKL; idle", device, host, eviction_policy=order)


@pytest.mark.parametrize("order", ALL)
def test_recency_rules_gauge_is_1_until_rates_are_learned(order: str) -> None:
    for host in (0, 4):
        assert manager(4, host, eviction_policy=order).stats().recency_rules


def test_each_tier_has_its_own_policy() -> None:
    """`a` is the first in, `b` the least recently used."""
    orders = {"lru": ["a"], "test_fifo": ["b"]}
    for device, kept in orders.items():
        cache = manager(2, 0, device_eviction=device)
        for text in ("a!", "b!", "a!"):
            run(cache, text, "r")
        run(cache, "c!")
        assert [text for text in "ab" if cached(cache, text)] == kept
    for host, kept in orders.items():
        cache = manager(8, 2, "write_through", host_eviction=host)
        for text in ("a!", "b!", "a!", "c!"):
            run(cache, text, "r")
        assert [text for text in "ab" if on_host(cache, text) == [True]] == kept


@pytest.mark.parametrize("tier", ["device", "host"])
def test_an_unknown_eviction_policy_is_refused_with_the_choices(tier: str) -> None:
    config = KVCacheConfig(4, 4, **{f"{tier}_eviction": "oldest"})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"eviction_policy must be one of {', '.join(ALL)}, .*, got 'oldest'"):
        CacheManager(config)


def test_every_write_policy_has_a_backup_policy() -> None:
    assert list(BACKUP_POLICIES) == list(WritePolicy)
