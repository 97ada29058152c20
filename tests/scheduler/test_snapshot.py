"""`CacheManager.snapshot`: its sums are the pools' and the tree's, it is bounded, and it names no prompt."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from dataclasses import asdict

import pytest

from fastdeploy_kvcache_v1.contract.messages import Allocation, BlockHash, CacheLevel, LoadSlots, NoSpace
from fastdeploy_kvcache_v1.errors import PoolInUseError
from fastdeploy_kvcache_v1.scheduler import snapshot
from fastdeploy_kvcache_v1.scheduler.block_hashing import GivenHashes
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager

from .scenario import block, manager, play, prompt, run

PROMPTS = ("abcdef", "abcxyz", "abcdefgh", "qrst", "qr", "mnop")


class Walk:
    """Random calls of a manager's methods, none of them wrong."""

    def __init__(self, cache: CacheManager, seed: int) -> None:
        self.cache, self.dice = cache, random.Random(seed)
        self.count = 0
        self.requests: dict[str, str] = {}
        """Admitted, with their prompts."""
        self.lent: list[list[int]] = []
        self.loads: dict[str, int] = {}
        self.stores: list[str] = []

    def take(self) -> None:
        actions = (self.start, self.start, self.start, self.step, self.commit, self.end, self.preempt, self.lend)
        self.dice.choice((*actions, self.give_back, self.load, self.arrive, self.store, self.end_store, self.rare))()

    def start(self) -> None:
        self.count += 1
        name, text = f"r{self.count}", self.dice.choice(PROMPTS)
        self.cache.match_prefix(name, prompt(text + "!"))
        if isinstance(self.cache.allocate(name, len(text)), Allocation):
            self.requests[name] = text
        else:
            self.cache.release(name)

    def step(self) -> None:
        self.cache.take_swap_step()

    def commit(self) -> None:
        if self.requests:
            self.step()
            name = self.dice.choice(list(self.requests))
            self.cache.commit(name, len(self.requests[name]))

    def end(self) -> None:
        if self.requests:
            name = self.dice.choice(list(self.requests))
            del self.requests[name]
            self.cache.finish(name)

    def preempt(self) -> None:
        if self.requests:
            self.cache.preempt(self.requests.popitem()[0])

    def lend(self) -> None:
        slots = self.cache.lend(self.dice.randrange(1, 4))
        if not isinstance(slots, NoSpace):
            self.lent.append(slots)

    def give_back(self) -> None:
        if self.lent:
            self.cache.take_back(self.lent.pop())

    def load(self) -> None:
        self.count += 1
        level = self.dice.choice((CacheLevel.DEVICE, CacheLevel.HOST))
        given = self.cache.begin_load(f"l{self.count}", prompt(self.dice.choice(PROMPTS)).hashes, 0, level=level)
        if isinstance(given, LoadSlots):
            self.loads[f"l{self.count}"] = len(given.slots)

    def arrive(self) -> None:
        if self.loads:
            name, most = self.loads.popitem()
            self.cache.complete_load(name, self.dice.randrange(most + 1))

    def store(self) -> None:
        self.count += 1
        if self.cache.begin_device_store(f"s{self.count}", prompt(self.dice.choice(PROMPTS)).hashes, 0).slots:
            self.stores.append(f"s{self.count}")

    def end_store(self) -> None:
        if self.stores:
            self.cache.end_store(self.stores.pop())

    def rare(self) -> None:
        if self.dice.random() < 0.1:
            self.cache.reset_cache()
        elif self.dice.random() < 0.2:
            with contextlib.suppress(PoolInUseError):
                self.cache.resize_device_pool(self.dice.randrange(12, 20))


def check_sums(cache: CacheManager) -> snapshot.CacheSnapshot:
    """Compare a whole snapshot with the pools and the tree, and a short one with the whole one."""
    seen, stats = cache.snapshot(), cache.stats()
    device, host = cache._device_pool, cache._host_pool
    for tier, pool, slots in ((seen.device, device, "device_slots"), (seen.host, host, "host_slots")):
        listed = [slot for each in seen.runs for slot in getattr(each, slots)]
        assert tier.size == pool.size == tier.free + tier.cached + tier.private + tier.draining
        assert (tier.free, tier.unlisted) == (pool.num_free, 0)
        assert len(set(listed)) == len(listed) == tier.cached
        assert set(listed) <= pool.owned_slots()
        assert tier.cached + tier.private == pool.num_owned
        assert tier.held + tier.draining == len(pool.held_slots())
    assert seen.device.cached == stats.device_cached_blocks
    assert seen.host.cached == stats.host_cached_blocks
    assert seen.num_requests == stats.num_requests
    tree = [*cache._tree.runs(), *cache._residency.detached_runs()]
    expected = sorted((each.length, each.pins) for each in tree)
    assert sorted((each.num_blocks, each.pins) for each in seen.runs) == expected
    assert all(each.parent is None or each.parent < place for place, each in enumerate(seen.runs))
    short = cache.snapshot(3)
    assert short.device.unlisted == seen.device.cached - sum(len(each.device_slots) for each in short.runs)
    assert short.host.unlisted == seen.host.cached - sum(len(each.host_slots) for each in short.runs)
    assert [each.name for each in short.runs] == [each.name for each in seen.runs[: len(short.runs)]]
    return seen


def test_sums_of_a_snapshot_equal_those_of_pools_and_tree_after_each_step():
    seen = []
    for seed, policy in itertools.product(range(6), ("write_back", "write_through")):
        cache = manager(16, 10, policy)
        walk = Walk(cache, seed)
        for _ in range(300):
            walk.take()
            cache.check()
            seen.append(check_sums(cache))
    runs = [each for one in seen for each in one.runs]
    for count in ("free", "cached", "private", "draining", "held"):
        assert any(getattr(one.device, count) for one in seen), f"{count} is always 0: the walk proves nothing"
    assert {each.filling for each in runs} == {None, "host", "device"}
    assert {each.forgotten for each in runs} == {False, True}
    assert any(each.host_slots and not each.device_slots for each in runs)


def test_a_snapshot_leads_from_each_run_to_the_start_of_its_prompt():
    cache = play("run abcd; run abxy; run q", 20).cache
    runs = cache.snapshot().runs
    assert [(each.num_blocks, each.parent) for each in runs] == [(1, None), (2, None), (2, 1), (2, 1)]


def test_a_block_keeps_its_name_and_another_manager_gives_another():
    cache, other = (play("run abcd", 20).cache for _ in range(2))
    name = cache.snapshot().runs[0].name
    run(cache, "abX!", "later")
    assert name in {each.name for each in cache.snapshot().runs}
    assert other.snapshot().runs[0].name != name


def test_no_hash_and_no_request_id_is_in_a_snapshot():
    cache = manager(20, 20)
    cache.match_prefix("request-of-somebody", prompt("secret prompt"))
    run(cache, "secret prompt", "another-request")
    shown = repr(asdict(cache.snapshot()))
    for hidden in ("somebody", "another", block("secret").hex(), repr(block("s"))):
        assert hidden not in shown


def test_blocks_known_to_be_stored_are_counted():
    cache = play("run abcd", 20).cache
    assert cache.snapshot(stored={block("a"), block("abc"), block("z")}).runs[0].num_stored == 2
    assert cache.snapshot().runs[0].num_stored == 0


def grow(cache: CacheManager, name: str, length: int) -> None:
    """As `run`, without the check, which costs O(cache)."""
    hashes = [BlockHash(f"{name} {number}".encode()) for number in range(length)]
    cache.match_prefix(name, GivenHashes(hashes, length + 1))
    assert isinstance(cache.allocate(name, length), Allocation)
    cache.take_swap_step()
    cache.commit(name, length)
    cache.finish(name)


@pytest.mark.parametrize(("last", "num_runs"), [(1, snapshot.MOST_BLOCKS), (20_000, 1)])
def test_the_work_under_the_lock_does_not_grow_with_the_cache(monkeypatch, last, num_runs):
    """A root with 9,000 children, and a run longer than the limit."""
    cache, looked, newest_first = manager(30_000), [], snapshot._newest_first

    def counted(root, forgotten):
        for each in newest_first(root, forgotten):
            looked.append(each)
            yield each

    monkeypatch.setattr(snapshot, "_newest_first", counted)
    for number in range(9000):
        grow(cache, f"{number}", 1)
    grow(cache, "last", last)
    seen = cache.snapshot(10**9)
    assert (len(seen.runs), seen.runs[0].num_blocks) == (num_runs, last)
    assert sum(len(each.device_slots) for each in seen.runs) == snapshot.MOST_BLOCKS
    assert seen.device.unlisted == 9000 + last - snapshot.MOST_BLOCKS
    assert len(looked) <= num_runs + 1


def test_snapshots_of_another_thread_are_consistent():
    cache = manager(16, 10, "write_through")
    walk, stop, wrong = Walk(cache, 1), threading.Event(), []

    def look():
        while not stop.is_set():
            seen = cache.snapshot()
            for tier, slots in ((seen.device, "device_slots"), (seen.host, "host_slots")):
                listed = sum(len(getattr(each, slots)) for each in seen.runs)
                if (tier.cached, tier.size) != (listed, tier.free + tier.cached + tier.private + tier.draining):
                    wrong.append(seen)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for _ in range(2000):
            walk.take()
    finally:
        stop.set()
        thread.join()
    assert wrong == []
