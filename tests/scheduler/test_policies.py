"""The seams: what policies are told, that each tier has its own, and that a name is all it takes to choose one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fastdeploy_kvcache_v1.config import KVCacheConfig, WritePolicy
from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager
from fastdeploy_kvcache_v1.scheduler.places import Link
from fastdeploy_kvcache_v1.scheduler.policies.eviction import EvictionPolicy
from fastdeploy_kvcache_v1.scheduler.policies.lru import LeastRecentlyUsed
from fastdeploy_kvcache_v1.scheduler.policies.tables import BACKUP_POLICIES, EVICTION_POLICIES
from fastdeploy_kvcache_v1.scheduler.reuse.history import ReuseHistory

from .scenario import cached, manager, on_host, prompt, run, start

TOLD = ["entered", "used", "released", "passed_over", "unblocked", "deferred", "cut", "joined", "removed"]


class Recorder(LeastRecentlyUsed):
    """LRU that writes down what it is told: the event, and the last block of the run."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, str]] = []

    def step_taken(self) -> None:
        super().step_taken()
        self.told.append(("step_taken", ""))


def recording(name: str):  # type: ignore[no-untyped-def]
    plain = getattr(LeastRecentlyUsed, name)

    def told(self: Recorder, place: Link, *others: Link) -> None:
        self.told.append((name, place.run.last_hash.decode()))
        plain(self, place, *others) if name not in STATIC else plain(place, *others)

    return told


STATIC = {name for name in TOLD if isinstance(vars(LeastRecentlyUsed)[name], staticmethod)}
for each in TOLD:
    setattr(Recorder, each, recording(each))


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Recorder]]:
    made: list[Recorder] = []

    def make(history: ReuseHistory) -> EvictionPolicy:
        made.append(Recorder())
        return made[-1]

    monkeypatch.setitem(EVICTION_POLICIES, "recorder", make)
    return made  # type: ignore[return-value]


def watched(recorders: list[Recorder], device: int, host: int, policy: str) -> CacheManager:
    return manager(device, host, policy, device_eviction="recorder", host_eviction="recorder")


def news(recorder: Recorder) -> list[tuple[str, str]]:
    told, recorder.told = recorder.told, []
    return told


def test_a_run_enters_in_use_and_is_released_and_used_when_its_request_ends(recorders: list[Recorder]) -> None:
    cache = watched(recorders, 4, 4, "write_back")
    device, host = recorders
    run(cache, "ab!")
    assert [event for event in news(device) if event[0] != "step_taken"] == [
        ("entered", "ab"),
        ("released", "ab"),
        ("used", "ab"),
    ]
    assert [event for event in news(host) if event[0] != "step_taken"] == []


def test_a_match_cuts_a_run_and_its_release_joins_it(recorders: list[Recorder]) -> None:
    cache = watched(recorders, 4, 0, "write_back")
    run(cache, "ab!")
    news(recorders[0])
    cache.match_prefix("r", prompt("a!"))
    assert news(recorders[0]) == [("cut", "a")]
    cache.release("r")
    assert news(recorders[0]) == [("joined", "a")]


def test_a_run_that_waits_for_one_below_it_is_unblocked_when_that_leaves(
    recorders: list[Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = watched(recorders, 3, 0, "write_back")
    device = recorders[0]
    monkeypatch.setattr(device, "used", lambda place: None)  # first in, first out
    run(cache, "a!")
    cache.match_prefix("other", prompt("a!"))
    start(cache, "ab!", "r")
    cache.take_swap_step()
    cache.commit("r", 2)
    cache.release("other")
    cache.finish("r")
    news(device)
    cache.lend(3)
    assert news(device) == [("passed_over", "a"), ("unblocked", "a"), ("removed", "ab"), ("removed", "a")]


def test_each_tier_has_its_own_policy() -> None:
    """`a` is the first in, `b` the least recently used."""
    orders = {"lru": ["a"], "fifo": ["b"]}
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
    choices = "adaptive, lru, hyperbolic, lrfu"
    with pytest.raises(ConfigError, match=f"'oldest' of the {tier} tier: choose one of {choices}"):
        CacheManager(config)


def test_every_write_policy_has_a_backup_policy() -> None:
    assert list(BACKUP_POLICIES) == list(WritePolicy)
