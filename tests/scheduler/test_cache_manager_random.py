"""Long seeded runs of an engine-like driver: thousands of actions, everything verified after each."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from fastdeploy_kvcache_v1.config import KVCacheConfig, WritePolicy
from fastdeploy_kvcache_v1.errors import CacheStateError, PoolInUseError, UnknownRequestError
from fastdeploy_kvcache_v1.metadata import CacheLevel
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager

from .other_policies import OTHER_POLICIES
from .shadow import Shadow

BLOCK = 2


class Driver:
    """Random but engine-like: requests share prefixes, generate, end, come back longer; now and then disaster."""

    def __init__(self, seed: int, policy: WritePolicy, device: int, host: int, eviction: str = "lru") -> None:
        self.random = random.Random(seed)
        self.ordered = eviction != "shuffled"
        config = KVCacheConfig(
            device,
            host,
            block_size=BLOCK,
            write_policy=policy,
            device_eviction=eviction,
            host_eviction=eviction,
            max_queued_events=400,
        )
        self.manager = CacheManager(config)
        self.shadow = Shadow(self.manager)
        self.history: list[list[int]] = [[0]]
        self.fresh: set[str] = set()
        self.seen: Counter[str] = Counter()
        self.counter = 0

    def act(self) -> None:
        actions = {
            self.arrive: 8,
            self.grow: 10,
            self.step: 10,
            self.end: 5,
            self.retry: 3,
            self.expect: 3,
            self.load: 3,
            self.end_load: 3,
            self.store: 3,
            self.end_store: 3,
            self.resize: 0.2,
            self.reset: 0.1,
        }
        self.random.choices(list(actions), list(actions.values()))[0]()
        self.manager.check()
        for name, request in self.shadow.requests.items():
            if request.admitted and name not in self.fresh:
                self.shadow.verify(name)
        self.shadow.follow_events()

    def expect(self) -> None:
        """Requests wait of which some have been served before, and some never come."""
        line = self.random.choices(self.history[-40:], k=self.random.randint(0, 4))
        self.manager.expect([self.shadow.hashed(tokens) for tokens in line])

    def arrive(self) -> None:
        if len(self.shadow.requests) >= 6:
            return
        base = self.random.choice(self.history[-40:])
        tokens = base[: self.random.randint(1, len(base))] + [
            self.random.randint(0, 2) for _ in range(self.random.randint(0, 5))
        ]
        self.counter += 1
        name = f"r{self.counter}"
        found = self.shadow.match(name, tokens, resumed=self.random.random() < 0.1)
        expected = self.shadow.expected_match(tokens)
        assert found >= expected
        if found > expected:
            assert any(node.open_transfer for node in self.manager.nodes(name)), "found what was never announced"
        self.seen["matched"] += found
        self.grow_one(name)

    def grow_one(self, name: str) -> None:
        request = self.shadow.requests[name]
        tokens = min(len(request.tokens) + self.random.randint(0, 3), request.computed + self.random.randint(1, 12))
        if not request.admitted:
            tokens = len(request.tokens)
        if self.shadow.allocate(name, max(1, tokens)):
            self.fresh.add(name)
        else:
            self.seen["refused"] += 1
            self.shadow.end(name, "preempt" if request.admitted else "release")
            self.fresh.discard(name)

    def grow(self) -> None:
        if self.shadow.requests:
            self.grow_one(self.random.choice(list(self.shadow.requests)))

    def step(self) -> None:
        step = self.shadow.step()
        self.fresh.clear()
        self.seen["evict"] += len(step.evict)
        self.seen["swap_in"] += len(step.swap_in)
        if self.random.random() < (0.3 if step.swap_in else 0.03):  # few steps have swap-ins
            self.fail(step)
        for name, request in list(self.shadow.requests.items()):
            room = len(self.manager.block_table(name)) * BLOCK
            last = min(len(request.tokens), room)
            if request.admitted and request.computed < last and self.random.random() < 0.9:
                upto = self.random.randint(request.computed + 1, last)
                self.shadow.compute(name, upto, self.random.randint(0, 2))

    def fail(self, step) -> None:  # type: ignore[no-untyped-def]
        halves = [half for half in (step.evict, step.swap_in) if half]
        if halves:
            swap = self.random.choice(halves)
            slots = self.random.sample(swap.target_slots, self.random.randint(1, len(swap)))
            for name in self.shadow.fail(step, swap.target, slots):
                self.seen["failed"] += 1
                self.shadow.end(name, "preempt")

    def end(self) -> None:
        if not self.shadow.requests:
            return
        name = self.random.choice(list(self.shadow.requests))
        how = self.random.choice(["finish", "finish", "preempt", "release"])
        try:
            self.history.append(self.shadow.end(name, how))
        except CacheStateError:
            self.history.append(self.shadow.end(name, "finish"))
        self.fresh.discard(name)
        with pytest.raises(UnknownRequestError):
            self.manager.finish(name)

    def retry(self) -> None:
        """A request that is matched (and perhaps admitted) and rolled back leaves nothing behind."""
        before = self.fingerprint()
        tokens = self.random.choice(self.history[-40:])
        self.shadow.match("retried", tokens)
        if self.random.random() < 0.5 and self.manager.stats().device_free_blocks >= len(tokens):
            self.shadow.allocate("retried", len(tokens))
        self.shadow.end("retried", "release")
        assert self.fingerprint() == before

    def fingerprint(self) -> object:
        tree, residency = self.manager._tree, self.manager._residency
        blocks = [node for run in tree.runs() for node in run.nodes()]
        state = {node.hash: (node.device_slot, node.host_slot, node.hits, node.pins) for node in blocks}
        stats = self.manager.stats()
        queues = [
            [node.hash for run in queue for node in reversed(list(run.nodes()))]
            for order in (residency.device_order, residency.host_order)
            for queue in order.queues()
            if self.ordered
        ]
        return state, queues, stats.device_free_blocks, stats.host_free_blocks, stats.device_evictable_blocks

    def load(self) -> None:
        """Blocks of a prompt seen before, behind those that are cached or behind more."""
        tokens = self.random.choice(self.history[-40:])
        num_blocks = len(tokens) // BLOCK
        if not num_blocks or len(self.shadow.loads) >= 3:
            return
        first = min(self.shadow.expected_match(tokens) + self.random.choice([0, 0, 0, 1]), num_blocks - 1)
        level = self.random.choice([CacheLevel.HOST, CacheLevel.HOST, CacheLevel.DEVICE])
        self.counter += 1
        self.seen["loads"] += self.shadow.begin_load(f"l{self.counter}", tokens, first, level)

    def end_load(self) -> None:
        if not self.shadow.loads:
            return
        name = self.random.choice(list(self.shadow.loads))
        load = self.shadow.loads[name]
        if self.random.random() < 0.2:
            self.shadow.cancel_load(name)
        elif self.shadow.may_arrive(name):
            self.seen["loaded"] += self.shadow.complete_load(name, self.random.randint(0, len(load.slots)))

    def store(self) -> None:
        """What one of the last steps copied to the host."""
        if len(self.shadow.stores) >= 3 or not self.shadow.backed_up:
            return
        self.counter += 1
        step = self.random.choice(list(self.shadow.backed_up)[-6:])
        self.seen["stored"] += self.shadow.begin_store(f"s{self.counter}", step)

    def end_store(self) -> None:
        if self.shadow.stores:
            self.shadow.end_store(self.random.choice(list(self.shadow.stores)))

    def resize(self) -> None:
        size = self.manager.num_device_blocks + self.random.randint(-6, 6)
        before = self.manager.stats()
        try:
            self.manager.resize_device_pool(max(4, size))
        except PoolInUseError:
            assert self.manager.stats() == before
            self.seen["resize_refused"] += 1

    def reset(self) -> None:
        force = self.random.random() < 0.5
        self.shadow.reset(force=force)
        if force:
            self.fresh.clear()
            if not self.shadow.loads and not self.shadow.stores:
                self.manager.check_idle()
        assert not self.shadow.index[CacheLevel.DEVICE] or self.manager.take_events()[0].kind == "cleared"
        for known in self.shadow.index.values():
            known.clear()

    def finish_all(self) -> None:
        for name in list(self.shadow.requests):
            self.shadow.end(name, "finish")
        self.shadow.step()
        for name in list(self.shadow.loads):
            self.shadow.complete_load(name, 0)
        for name in list(self.shadow.stores):
            self.shadow.end_store(name)
        self.manager.check_idle()


def play(seeds: range, policy: WritePolicy, device: int, host: int, eviction: str = "lru") -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        driver = Driver(seed, policy, device, host, eviction)
        for _ in range(700):
            driver.act()
        driver.finish_all()
        seen += driver.seen
    return seen


@pytest.mark.parametrize("policy", WritePolicy)
@pytest.mark.parametrize(("device", "host"), [(10, 0), (10, 6), (12, 40), (40, 12)])
def test_long_runs(policy: WritePolicy, device: int, host: int) -> None:
    seen = play(range(4), policy, device, host)
    # The run is only worth something if it went through what it is for.
    assert seen["matched"]
    assert seen["refused"]
    if host:
        assert seen["evict"]
        assert seen["loaded"]
        assert seen["stored"]
        assert seen["swap_in"] or host < device  # a small host tier is a subset of the device tier
        assert seen["failed"] or host < device


@pytest.mark.parametrize("eviction", ["adaptive", "hyperbolic", "lrfu", *OTHER_POLICIES])
@pytest.mark.parametrize("policy", WritePolicy)
def test_long_runs_under_other_eviction_policies(policy: WritePolicy, eviction: str) -> None:
    seen = play(range(3), policy, 12, 24, eviction)
    assert seen["matched"]
    assert seen["refused"]
    assert seen["evict"]
    assert seen["swap_in"]
    assert seen["loaded"]
