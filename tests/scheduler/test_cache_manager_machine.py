"""Hypothesis drives the manager through every order of events it can find, against the shadow's slow, obvious model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fastdeploy_kvcache_v1.config import KVCacheConfig, WritePolicy
from fastdeploy_kvcache_v1.errors import CacheStateError, KVCacheError, PoolInUseError, UnknownRequestError
from fastdeploy_kvcache_v1.metadata import CacheLevel, DeviceSlot, NoSpace
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager
from fastdeploy_kvcache_v1.scheduler.policies.tables import EVICTION_POLICIES

from .other_policies import OTHER_POLICIES
from .shadow import Shadow

BLOCK = 2
EVICTIONS = [*EVICTION_POLICIES, *OTHER_POLICIES]
tokens_strategy = st.lists(st.integers(0, 1), min_size=1, max_size=14)


class ManagerMachine(RuleBasedStateMachine):
    """Two-token blocks over a two-token vocabulary: every request shares prefixes with every other."""

    @initialize(
        device=st.integers(1, 12),
        profiled=st.integers(1, 12),
        host=st.integers(0, 16),
        policy=st.sampled_from(WritePolicy),
        evictions=st.tuples(st.sampled_from(EVICTIONS), st.sampled_from(EVICTIONS)),
        threshold=st.integers(1, 3),
        events=st.sampled_from([3, 10_000]),
    )
    def start(
        self,
        device: int,
        profiled: int,
        host: int,
        policy: WritePolicy,
        evictions: tuple[str, str],
        threshold: int,
        events: int,
    ) -> None:
        config = KVCacheConfig(
            device,
            host,
            block_size=BLOCK,
            write_policy=policy,
            device_eviction=evictions[0],
            host_eviction=evictions[1],
            write_through_threshold=threshold,
            max_queued_events=events,
        )
        self.manager = CacheManager(config)
        self.manager.resize_device_pool(profiled)
        self.shadow = Shadow(self.manager)
        self.counter = 0
        self.scheduled: set[str] = set()  # allocated since the last step: nothing of theirs has been computed
        self.lent: list[DeviceSlot] = []

    # ---- helpers

    def pick(self, data: st.DataObject, names: list[str]) -> str:
        return data.draw(st.sampled_from(names))

    @property
    def names(self) -> list[str]:
        return list(self.shadow.requests)

    def admitted(self) -> list[str]:
        return [name for name, request in self.shadow.requests.items() if request.admitted]

    # ---- rules

    @rule(tokens=tokens_strategy, most=st.none() | st.integers(0, 5), resumed=st.booleans())
    def match(self, tokens: list[int], most: int | None, resumed: bool) -> None:
        self.shadow.follow_events()
        name = f"r{self.counter}"
        self.counter += 1
        found = self.shadow.match(name, tokens, max_blocks=most, resumed=resumed)
        # Nothing is reported before it has been handed to the worker, and nothing reported is missed.
        expected = self.shadow.expected_match(tokens)
        pending = found - (expected if most is None else min(expected, most))
        assert pending >= 0
        if pending:
            assert any(node.open_transfer for node in self.manager.nodes(name))

    @precondition(lambda self: self.names)
    @rule(data=st.data(), extra=st.integers(0, 6))
    def allocate(self, data: st.DataObject, extra: int) -> None:
        name = self.pick(data, self.names)
        request = self.shadow.requests[name]
        if self.shadow.allocate(name, len(request.tokens) + extra):
            self.scheduled.add(name)

    @rule(line=st.lists(tokens_strategy, max_size=3))
    def expect(self, line: list[list[int]]) -> None:
        self.manager.expect([self.shadow.hashed(tokens) for tokens in line])

    @rule(data=st.data(), fail=st.booleans())
    def step(self, data: st.DataObject, fail: bool) -> None:
        step = self.shadow.step()
        self.scheduled.clear()
        if fail and (step.evict or step.swap_in):
            swap = data.draw(st.sampled_from([half for half in (step.evict, step.swap_in) if half]))
            slots = data.draw(st.lists(st.sampled_from(swap.target_slots), min_size=1, unique=True))
            self.shadow.spoil(step, swap.target, slots)

    @precondition(lambda self: self.shadow.unreported)
    @rule()
    def report(self) -> None:
        """The worker's answer to a step comes at last; requests that it names were not computed."""
        for name in self.shadow.report():
            self.shadow.end(name, "preempt")
            self.scheduled.discard(name)

    @precondition(lambda self: self.computable())
    @rule(data=st.data(), sample=st.integers(0, 1))
    def compute(self, data: st.DataObject, sample: int) -> None:
        """What earlier steps allocated is computed and committed, while the next one is being decided."""
        name = self.pick(data, self.computable())
        request = self.shadow.requests[name]
        last = min(len(request.tokens), request.closed)
        self.shadow.compute(name, data.draw(st.integers(request.computed + 1, last)), sample)

    def computable(self) -> list[str]:
        """A pass over what a copy did not fill fails: of such a copy the manager is told first."""
        waits = {name: min(len(request.tokens), request.closed) for name, request in self.shadow.requests.items()}
        return [
            name
            for name in self.admitted()
            if self.shadow.requests[name].computed < waits[name] and not self.shadow.reads_garbage(name)
        ]

    @precondition(lambda self: self.counter % 5 == 3)
    @rule(early=st.booleans())
    def lose_step(self, early: bool) -> None:
        """A batch is dropped on its way: requests that it names start again, before or after the reset."""
        for name in self.scheduled if early else ():
            self.shadow.end(name, "preempt")
        self.shadow.lose_step()
        for index in self.shadow.index.values():
            index.clear()
        self.manager.check()
        for name in () if early else self.scheduled:
            self.shadow.end(name, "preempt")
        self.scheduled.clear()

    # ---- slots of a scheduler that keeps its own block tables

    @rule(count=st.integers(0, 4))
    def lend(self, count: int) -> None:
        available = self.manager.num_available_device_blocks
        slots = self.manager.lend(count)
        assert isinstance(slots, NoSpace) == (count > available)
        if not isinstance(slots, NoSpace):
            self.lent += slots

    @precondition(lambda self: self.lent)
    @rule(data=st.data())
    def take_back(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, len(self.lent)))
        self.manager.take_back(self.lent[:count])
        del self.lent[:count]

    @precondition(lambda self: self.lent and set(self.admitted()) - self.scheduled)
    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        name = self.pick(data, sorted(set(self.admitted()) - self.scheduled))
        count = data.draw(st.integers(1, len(self.lent)))
        self.shadow.adopt(name, self.lent[:count])
        del self.lent[:count]

    # ---- blocks from outside the two tiers

    @rule(
        data=st.data(),
        tokens=st.lists(st.integers(0, 1), min_size=BLOCK, max_size=14),
        level=st.sampled_from([CacheLevel.DEVICE, CacheLevel.HOST]),
    )
    def begin_load(self, data: st.DataObject, tokens: list[int], level: CacheLevel) -> None:
        self.counter += 1
        before = self.manager.stats()
        first = data.draw(st.integers(0, len(tokens) // BLOCK - 1))
        if not self.shadow.begin_load(f"l{self.counter}", tokens, first, level):
            after = self.manager.stats()
            assert after.counters.allocations_refused == before.counters.allocations_refused + 1
            assert replace(after, counters=before.counters) == before

    @precondition(lambda self: self.arriving())
    @rule(data=st.data())
    def bytes_arrive(self, data: st.DataObject) -> None:
        name = self.pick(data, self.arriving())
        load = self.shadow.loads[name]
        self.shadow.arrive(name, data.draw(st.integers(0, len(load.slots) - 1)), garbage=data.draw(st.booleans()))

    def arriving(self) -> list[str]:
        return [name for name in self.shadow.loads if self.shadow.may_arrive(name)]

    @precondition(lambda self: self.shadow.loads)
    @rule(data=st.data())
    def complete_load(self, data: st.DataObject) -> None:
        self.shadow.follow_events()
        name = self.pick(data, list(self.shadow.loads))
        load = self.shadow.loads[name]
        most = len(load.slots) if self.shadow.may_arrive(name) else 0
        num_cached = self.shadow.complete_load(name, data.draw(st.integers(0, most)))
        events = self.manager.take_events()
        for event in events:
            self.shadow.follow(event)
        told = [event for event in events if event.kind == "stored"]
        if events and events[0].kind != "cleared":
            assert [(event.level, len(event.hashes)) for event in told] == [(load.level, num_cached)] * bool(num_cached)
        with pytest.raises(CacheStateError):
            self.manager.complete_load(name, 0)

    @precondition(lambda self: self.shadow.loads)
    @rule(data=st.data())
    def cancel_load(self, data: st.DataObject) -> None:
        self.shadow.cancel_load(self.pick(data, list(self.shadow.loads)))

    @precondition(lambda self: self.shadow.backed_up)
    @rule(data=st.data())
    def begin_store(self, data: st.DataObject) -> None:
        self.counter += 1
        steps = list(self.shadow.backed_up)
        self.shadow.begin_store(f"s{self.counter}", data.draw(st.sampled_from(steps[-8:])))

    @precondition(lambda self: self.shadow.stores)
    @rule(data=st.data())
    def end_store(self, data: st.DataObject) -> None:
        self.shadow.end_store(self.pick(data, list(self.shadow.stores)))

    @precondition(lambda self: self.names)
    @rule(data=st.data(), how=st.sampled_from(["finish", "preempt"]))
    def end(self, data: st.DataObject, how: str) -> None:
        name = self.pick(data, self.names)
        self.shadow.end(name, how)
        self.scheduled.discard(name)
        with pytest.raises(UnknownRequestError):
            self.manager.finish(name)

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = self.pick(data, self.names)
        try:
            self.shadow.end(name, "release")
            self.scheduled.discard(name)
        except CacheStateError:
            assert self.shadow.requests[name].admitted

    @precondition(lambda self: self.scheduled)
    @rule(data=st.data())
    def commit_too_early(self, data: st.DataObject) -> None:
        name = self.pick(data, sorted(self.scheduled))
        request = self.shadow.requests[name]
        with pytest.raises(CacheStateError):
            self.manager.commit(name, max(request.closed, request.adopted) + 1)

    @precondition(lambda self: self.counter % 5 == 4)
    @rule(force=st.booleans())
    def reset(self, force: bool) -> None:
        self.shadow.reset(force=force)
        if force:
            self.scheduled.clear()
            self.lent.clear()
            stats = self.manager.stats()
            assert stats.device_free_blocks + stats.device_loading_blocks == stats.device_blocks
            stored = stats.host_blocks - stats.host_free_blocks - stats.host_loading_blocks
            assert stored >= self.shadow.num_stored_slots, "each store kept its slots"
            assert self.shadow.stores or not stored
            if not self.shadow.loads and not self.shadow.stores:
                self.manager.check_idle()
        for index in self.shadow.index.values():
            index.clear()

    @precondition(lambda self: self.counter % 4 == 3)
    @rule(size=st.integers(0, 14))
    def resize(self, size: int) -> None:
        before = self.manager.stats()
        try:
            self.manager.resize_device_pool(size)
        except PoolInUseError:
            assert self.manager.stats() == before
        except KVCacheError:
            assert size < 1
            assert self.manager.stats() == before
        else:
            assert self.manager.num_device_blocks == size

    @rule()
    def events(self) -> None:
        self.shadow.follow_events()
        tiers: dict[CacheLevel, set[bytes]] = {CacheLevel.DEVICE: set(), CacheLevel.HOST: set()}
        for run in self.manager._tree.runs():
            if run.on_device and run.open is not CacheLevel.DEVICE:
                tiers[CacheLevel.DEVICE].update(run.hashes)
            if run.host is not None and run.open is not CacheLevel.HOST:
                tiers[CacheLevel.HOST].update(run.hashes)
        assert tiers == self.shadow.index

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check()
        stats = self.manager.stats()
        assert self.manager.num_available_device_blocks == stats.device_free_blocks + stats.device_evictable_blocks
        assert self.manager.lent_slots() == set(self.lent)
        loads = self.shadow.loads.values()
        on_host = sum(len(load.slots) for load in loads if load.level is CacheLevel.HOST)
        assert stats.host_loading_blocks == on_host
        assert stats.device_loading_blocks == sum(len(load.slots) for load in loads) - on_host
        assert stats.quarantined_blocks == sum(len(load.slots) for load in loads if load.cancelled)
        assert stats.host_free_blocks + stats.host_cached_blocks + on_host == stats.host_blocks
        for name in self.admitted():
            if name not in self.scheduled:
                self.shadow.verify(name)
        self.shadow.verify_all()

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        while self.shadow.unreported:
            self.report()
        self.manager.take_back(self.lent)
        for name in list(self.shadow.loads):
            self.shadow.complete_load(name, 0)
        for name in list(self.shadow.stores):
            self.shadow.end_store(name)
        for name in self.names:
            self.shadow.end(name, "finish")
        self.shadow.step()
        while self.shadow.unreported:
            self.report()
        self.manager.check_idle()
        self.shadow.verify_all()


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
