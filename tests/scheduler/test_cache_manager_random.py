"""Long seeded runs of an engine-like driver: thousands of actions, everything verified after each."""

from __future__ import annotations

import random
from collections import Counter
from itertools import compress

import pytest

from fastdeploy_kvcache_v1.config import KVCacheConfig, WritePolicy
from fastdeploy_kvcache_v1.errors import CacheStateError, PoolInUseError, UnknownRequestError
from fastdeploy_kvcache_v1.metadata import CacheAccess, CacheLevel, DeviceSlot, NoSpace, StoreSource, SwapStep
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager

from .other_policies import OTHER_POLICIES
from .shadow import Prefix, Shadow

BLOCK = 2
NUM_NAMES = 10
OFTEN = (
    "while a swap-in is planned",
    "while a copy out is planned",
    "during a load",
    "in a quarantine",
    "during a store",
    "during a store from the device",
    "while slots are lent",
    "before a report",
    "while forgotten blocks are in use",
    "while a match waits",
)
SELDOM = ("while a swap-in is planned that no request waits for", "while a swap-in is planned of what a store reads")


class Driver:
    """Random but engine-like: requests share prefixes, generate, end, come back longer; now and then disaster.

    Each seed has its own taste: how often it does each thing, so that rare ones meet each other.
    """

    def __init__(
        self, seed: int, policy: WritePolicy, device: int, host: int, device_order: str = "lru", host_order: str = "lru"
    ) -> None:
        self.random = random.Random(seed)
        self.ordered = "shuffled" not in (device_order, host_order)
        config = KVCacheConfig(
            self.random.randint(1, device),
            host,
            block_size=BLOCK,
            write_policy=policy,
            device_eviction=device_order,
            host_eviction=host_order,
            max_queued_events=400,
        )
        self.manager = CacheManager(config)
        self.manager.resize_device_pool(device)  # as after profiling
        self.device = device
        self.shadow = Shadow(self.manager)
        self.history: list[list[int]] = [[0]]
        self.fresh: set[str] = set()
        """Requests that got blocks in the step that is being decided."""
        self.lent: list[DeviceSlot] = []
        self.device_stores: dict[str, tuple[StoreSource, list[list[Prefix]]]] = {}
        self.seen: Counter[str] = Counter()
        often = {self.arrive: 12, self.grow: 5, self.step: 9, self.compute_some: 4, self.end: 8}
        sometimes = {
            self.undo: 2,
            self.race: 1.5,
            self.retry: 1.5,
            self.expect: 1.5,
            self.load: 1.5,
            self.end_load: 1.5,
            self.store: 2,
            self.end_store: 1.5,
            self.store_from_device: 0.8,
            self.end_store_from_device: 0.8,
            self.lend: 0.6,
            self.take_back: 0.6,
            self.adopt: 1,
            self.report: 1.5,
            self.repeat: 0.3,
            self.resize: 0.6,
            self.reset: 0.2,
            self.lose_step: 0.15,
        }
        self.fails = self.random.choice([0.1, 0.3, 0.8])
        taste = {action: self.random.choice([0.1, 1, 1, 3]) * weight for action, weight in sometimes.items()}
        self.weights = {**often, **taste}

    def act(self) -> None:
        action = self.random.choices(list(self.weights), list(self.weights.values()))[0]
        for state in self.states():
            self.seen[f"{action.__name__} {state}"] += 1
        action()
        self.manager.check()
        for name, request in self.shadow.requests.items():
            if request.admitted and name not in self.fresh:
                self.shadow.verify(name)
        self.shadow.verify_all()
        self.shadow.follow_events()
        for source, before in self.device_stores.values():
            assert [self.shadow.device[slot] for slot in source.slots] == before, "filled while a store read it"

    def states(self) -> list[str]:
        """What is under way."""
        shadow, residency = self.shadow, self.manager._residency
        planned = residency.open_copies(CacheLevel.DEVICE)
        holds = [
            planned,
            residency.open_copies(CacheLevel.HOST),
            any(not load.cancelled for load in shadow.loads.values()),
            any(load.cancelled for load in shadow.loads.values()),
            shadow.stores,
            self.device_stores,
            self.lent,
            shadow.unreported,
            residency.detached_runs(),
            any(not request.admitted for request in shadow.requests.values()),
            any(not run.pins for run in planned),
            any(run.is_read for run in planned),
        ]
        return list(compress((*OFTEN, *SELDOM), holds))

    def new_name(self, kind: str, known: object) -> str:
        """Names come back once they are free."""
        return next(name for number in range(NUM_NAMES) if (name := f"{kind}{number}") not in known)  # type: ignore[operator]

    def expect(self) -> None:
        """Requests wait of which some have been served before, and some never come."""
        line = self.random.choices(self.history[-40:], k=self.random.randint(0, 4))
        self.manager.expect([self.shadow.hashed(tokens) for tokens in line])

    # ---- requests

    def arrive(self) -> None:
        if len(self.shadow.requests) >= 6:
            return
        base = self.random.choice(self.history[-self.random.choice([5, 40]) :])
        if self.random.random() < 0.3:
            base = self.random.choice(self.on_host() or [base])
        shared = self.random.choice([len(base), self.random.randint(1, len(base))])
        tokens = base[:shared] + [self.random.randint(0, 2) for _ in range(self.random.randint(0, 8))]
        name = self.new_name("r", self.shadow.requests)
        access = self.random.choice([CacheAccess()] * 8 + [CacheAccess(reads=False), CacheAccess(writes=False)])
        most = self.random.choice([None, None, None, 0, 1, 2])
        found = self.shadow.match(name, tokens, max_blocks=most, resumed=self.random.random() < 0.1, access=access)
        expected = self.shadow.expected_match(tokens) if access.reads else 0
        expected = expected if most is None else min(expected, most)
        assert found >= expected
        if found > expected:
            assert any(node.open_transfer for node in self.manager.nodes(name)), "found what was never announced"
        self.seen["matched"] += found
        if self.random.random() < 0.85:
            self.grow_one(name)

    def on_host(self) -> list[list[int]]:
        """Prompts of late that wait for copies from the host when they come again."""
        prompts = [(tokens, self.shadow.hashed(tokens).hashes) for tokens in self.history[-20:]]
        count, count_on_device = self.manager.count_cached, self.manager.count_on_device
        return [tokens for tokens, hashes in prompts if count(hashes) > count_on_device(hashes)]

    def grow_one(self, name: str) -> None:
        request = self.shadow.requests[name]
        tokens = min(len(request.tokens) + self.random.randint(0, 3), request.computed + self.random.randint(1, 12))
        if not request.admitted:
            tokens = len(request.tokens)
        if self.shadow.allocate(name, max(1, tokens)):
            self.fresh.add(name)
        else:
            self.seen["refused"] += 1
            self.drop(name, "preempt" if request.admitted else "release")

    def grow(self) -> None:
        if self.shadow.requests:
            self.grow_one(self.random.choice(list(self.shadow.requests)))

    def drop(self, name: str, how: str) -> list[int]:
        self.fresh.discard(name)
        return self.shadow.end(name, how)

    def end(self) -> None:
        if not self.shadow.requests:
            return
        name = self.random.choice(list(self.shadow.requests))
        try:
            self.history.append(self.drop(name, self.random.choice(["finish", "finish", "preempt", "release"])))
        except CacheStateError:
            self.history.append(self.drop(name, "finish"))
        with pytest.raises(UnknownRequestError):
            self.manager.finish(name)

    def undo(self) -> None:
        """What this step admitted is not scheduled after all."""
        if self.fresh:
            name = self.random.choice(sorted(self.fresh))
            if not self.shadow.requests[name].closed:
                self.drop(name, "release")

    def race(self) -> None:
        """One request computes what another one is about to load; both end before the step is taken."""
        on_host = self.on_host()
        if not on_host or len(self.shadow.requests) >= 6:
            return
        tokens = self.random.choice(on_host) + [self.random.randint(0, 2) for _ in range(2 * BLOCK)]
        computes = self.new_name("r", self.shadow.requests)
        self.shadow.match(computes, tokens, max_blocks=self.random.randint(0, 1))
        self.grow_one(computes)
        self.step()
        self.store()
        loads = self.new_name("r", self.shadow.requests)
        self.shadow.match(loads, tokens)
        self.grow_one(loads)
        self.compute_some()
        for name in self.random.sample([loads, computes], self.random.choice([0, 1, 2, 2])):
            if name in self.shadow.requests:
                self.drop(name, "preempt")

    def retry(self) -> None:
        """A request that is matched (and perhaps admitted) and rolled back leaves nothing behind."""
        before = self.fingerprint()
        tokens = self.random.choice(self.history[-40:])
        has_room = self.manager.stats().device_free_blocks >= len(tokens)
        alone = all(request.admitted for request in self.shadow.requests.values())  # or it plans another one's swap-in
        self.shadow.match("retried", tokens)
        if has_room and alone and self.random.random() < 0.5:
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

    def repeat(self) -> None:
        """An id that is in use is refused, and nothing changes."""
        before = self.manager.stats()
        for name in self.shadow.requests:
            with pytest.raises(CacheStateError, match="is matched already"):
                self.manager.match_prefix(name, self.shadow.hashed([0]))
        for name in self.shadow.loads:
            with pytest.raises(CacheStateError, match="has begun already"):
                self.manager.begin_load(name, self.shadow.hashed([0] * BLOCK).hashes, 0)
        for name in (*self.shadow.stores, *self.device_stores):
            with pytest.raises(CacheStateError, match="has begun already"):
                self.manager.begin_store(name, 0, frozenset())
        assert self.manager.stats() == before

    # ---- the worker

    def step(self) -> None:
        step = self.shadow.step()
        self.fresh.clear()
        self.seen["evict"] += len(step.evict)
        self.seen["swap_in"] += len(step.swap_in)
        if self.random.random() < (self.fails if step.swap_in else self.fails / 5):  # few steps have swap-ins
            self.fail(step)
        if self.random.random() < 0.8:
            self.compute_some()

    def compute_some(self) -> None:
        """What earlier steps allocated is computed and committed, while the next one is being decided."""
        for name in list(self.shadow.requests):
            while name in self.shadow.requests and self.shadow.reads_garbage(name):
                self.report()
        for name, request in self.shadow.requests.items():
            last = min(len(request.tokens), request.closed)
            if request.computed < last and self.random.random() < 0.9:
                self.shadow.compute(name, self.random.randint(request.computed + 1, last), self.random.randint(0, 2))

    def fail(self, step: SwapStep) -> None:
        halves = [half for half in (step.evict, step.swap_in) if half]
        if halves:
            swap = self.random.choice(halves)
            self.shadow.spoil(
                step, swap.target, self.random.sample(swap.target_slots, self.random.randint(1, len(swap)))
            )

    def report(self) -> None:
        """Copies that failed are heard of, perhaps some steps later."""
        if self.shadow.unreported:
            for name in self.shadow.report():
                self.seen["failed"] += 1
                self.drop(name, "preempt")

    # ---- blocks from and to outside

    def load(self) -> None:
        """Blocks of a prompt seen before, behind those that are cached or behind more."""
        tokens = self.random.choice(self.history[-40:])
        num_blocks = len(tokens) // BLOCK
        if not num_blocks or len(self.shadow.loads) >= 3:
            return
        first = min(self.shadow.expected_match(tokens) + self.random.choice([0, 0, 0, 1]), num_blocks - 1)
        level = self.random.choice([CacheLevel.HOST, CacheLevel.HOST, CacheLevel.DEVICE])
        self.seen["loads"] += self.shadow.begin_load(self.new_name("l", self.shadow.loads), tokens, first, level)

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
        step = self.random.choice(list(self.shadow.backed_up)[-6:])
        self.seen["stored"] += self.shadow.begin_store(self.new_name("s", self.shadow.stores), step)

    def end_store(self) -> None:
        if self.shadow.stores:
            self.shadow.end_store(self.random.choice(list(self.shadow.stores)))

    def store_from_device(self) -> None:
        """Once the worker has ended every copy that it was told of."""
        hashes = self.shadow.hashed(self.random.choice(self.history[-40:])).hashes
        if not hashes or len(self.device_stores) >= 2 or self.shadow.unreported:
            return
        name, first = self.new_name("d", self.device_stores), self.random.randrange(len(hashes))
        source = self.manager.begin_device_store(name, hashes, first, most=self.random.choice([None, 1, 2]))
        assert source.hashes == tuple(hashes[first : first + len(source.slots)])
        held = [list(self.shadow.device[slot]) for slot in source.slots]
        assert held == [self.shadow.content[block] for block in source.hashes]
        if source.slots:
            self.device_stores[name] = source, held

    def end_store_from_device(self) -> None:
        if self.device_stores:
            name = self.random.choice(list(self.device_stores))
            del self.device_stores[name]
            self.manager.end_store(name)

    # ---- slots of a scheduler that keeps its own block tables

    def lend(self) -> None:
        if len(self.lent) < 2:
            slots = self.manager.lend(self.random.randint(1, 2))
            self.lent += [] if isinstance(slots, NoSpace) else slots

    def take_back(self) -> None:
        if self.lent:
            self.manager.take_back([self.lent.pop(self.random.randrange(len(self.lent)))])

    def adopt(self) -> None:
        names = [name for name, request in self.shadow.requests.items() if request.admitted]
        if names and self.lent:
            count = self.random.randint(1, len(self.lent))
            name = self.random.choice(names)
            self.shadow.adopt(name, self.lent[:count])
            del self.lent[:count]
            self.fresh.add(name)

    # ---- administration

    def resize(self) -> None:
        """Around the size that it began with; up to twice as much now and then."""
        size = self.random.choice([self.device + self.random.randint(-6, 6), self.random.randint(1, 2 * self.device)])
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
            self.lent.clear()
            if not self.shadow.loads and not self.shadow.stores and not self.device_stores:
                self.manager.check_idle()
        self.forget_index()

    def lose_step(self) -> None:
        """FastDeploy drops a batch on its way: requests that it names start again, before or after the reset."""
        named, early = list(self.fresh), self.random.random() < 0.5
        for name in named if early else ():
            self.drop(name, "preempt")
        self.shadow.lose_step()
        self.forget_index()
        self.manager.check()
        for name in () if early else named:
            self.drop(name, "preempt")

    def forget_index(self) -> None:
        assert not self.shadow.index[CacheLevel.DEVICE] or self.manager.take_events()[0].kind == "cleared"
        for known in self.shadow.index.values():
            known.clear()

    def finish_all(self) -> None:
        while self.shadow.unreported:
            self.report()
        for name in list(self.shadow.requests):
            self.drop(name, "finish")
        self.manager.take_back(self.lent)
        self.shadow.step()
        while self.shadow.unreported:
            self.report()
        for name in list(self.shadow.loads):
            self.shadow.complete_load(name, 0)
        for name in list(self.shadow.stores):
            self.shadow.end_store(name)
        for name in self.device_stores:
            self.manager.end_store(name)
        self.manager.check_idle()
        self.shadow.verify_all()
        stats = self.manager.stats()
        assert stats.host_free_blocks + stats.host_cached_blocks == stats.host_blocks


def play(
    seeds: range, policy: WritePolicy, device: int, host: int, device_order: str = "lru", host_order: str = "lru"
) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        driver = Driver(seed, policy, device, host, device_order, host_order)
        for _ in range(700):
            driver.act()
        driver.finish_all()
        seen += driver.seen
    return seen


@pytest.mark.parametrize("policy", WritePolicy)
@pytest.mark.parametrize(("device", "host"), [(12, 0), (12, 8), (16, 48), (40, 12)])
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
    seen = play(range(3), policy, 16, 32, eviction, eviction)
    assert seen["matched"]
    assert seen["refused"]
    assert seen["evict"]
    assert seen["swap_in"]
    assert seen["loaded"]


def test_every_event_comes_while_each_of_the_others_is_under_way() -> None:
    seen = play(range(40), WritePolicy.WRITE_THROUGH, 16, 48, "lru", "adaptive")
    events = [
        "arrive",
        "step",
        "compute_some",
        "end",
        "end_load",
        "end_store",
        "report",
        "resize",
        "reset",
        "lose_step",
    ]
    missed = [f"{event} {state}" for event in events for state in OFTEN if not seen[f"{event} {state}"]]
    assert not missed
    assert all(seen[f"step {state}"] for state in SELDOM)
