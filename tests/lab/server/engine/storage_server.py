"""Harness with a storage tier, over a store of the world's that answers when the test says so."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from fastdeploy_kvcache_v1.config import KVCacheConfig, WritePolicy
from fastdeploy_kvcache_v1.storage.attention_store.tier import AttentionStoreTier
from fastdeploy_kvcache_v1.storage.engine.tier import StorageTier
from fastdeploy_kvcache_v1.storage.messages import RankDone
from fastdeploy_kvcache_v1.storage.settings import StorageSettings
from tests.lab.server.harness import Harness, expected_outputs
from tests.storage.values import namespace
from tests.world import store as world_store
from tests.world.chance import Faults
from tests.world.streams import Clock

BLOCK = 4


class Told:
    """Takes as long as the test says, and fails never."""

    seconds_per_block = 0.0
    """That a load says it took; 0 says nothing."""

    def __init__(self, *given):
        super().__init__(*given)
        self.questions, self.loads, self.stores, *_ = self.calls.values()
        self.touched: list[Any] = []
        self.stated: list[Any] = []
        """What the index took, in order."""

    def touch(self, touch_id, hashes):
        self.touched.append(list(hashes))
        super().touch(touch_id, hashes)

    def _load(self, *given):
        def timed(answer):
            if isinstance(answer, RankDone):
                return replace(answer, answer=timed(answer.answer))
            return replace(answer, seconds=answer.num_arrived * self.seconds_per_block)

        return [timed(each) for each in super()._load(*given)]

    def _state(self, call, fails, *given):
        self.stated += [] if fails else [call]
        return super()._state(call, fails, *given)


class HostStore(Told, world_store.Store):
    pass


class DeviceStore(Told, world_store.TokenStore):
    pass


class StorageServer:
    """Servers may share what is stored. A subclass chooses the tier and its store."""

    backend: str
    tiers: tuple[int, int]
    """Default sizes."""

    def __init__(self, *, stored=None, device=None, host=None, seed=0, prefetch="timeout", min_tokens=4, **options):
        self.clock, self._random = Clock(), random.Random(seed)
        flush_only = options.pop("flush_only", False)
        settings = StorageSettings(self.backend, prefetch=prefetch, min_tokens=min_tokens, flush_only=flush_only)
        on_device, sizes = settings.uses_device_tier, (device or self.tiers[0], self.tiers[1] if host is None else host)
        config = KVCacheConfig(
            *sizes,
            block_size=BLOCK,
            write_policy=WritePolicy.WRITE_BACK if on_device else WritePolicy.WRITE_THROUGH,
            max_queued_events=KVCacheConfig.max_queued_events if flush_only else 0,
        )

        def storage(manager, harness):
            world = SimpleNamespace(
                clock=self.clock, log=lambda *words: None, faults=Faults([]), host=SimpleNamespace(block_size=BLOCK)
            )
            memory = world_store.RankMemory(on_device=on_device)
            memory.use(harness.worker.controller)
            self.store: Any = (DeviceStore if on_device else HostStore)(world, [memory])
            if stored is not None:
                self.store.values = stored
            tier = AttentionStoreTier if on_device else StorageTier
            return tier(manager, settings, namespace(), self.store, clock=self.clock)

        self.harness = Harness(config, storage=storage, **options)
        self.core, self.tier, self.manager = self.harness.core, self.harness.storage, self.harness.manager
        self.store.listen(self._hear)
        self._states = flush_only

    def _hear(self, answer):
        self.core.on_storage(answer)
        self.manager.check()

    def ask(self, name, prompt, count=2, **options):
        """A whole request, and everything that the store does for it; how many tokens were cached."""
        recorder = self.harness.submit(name, prompt, count, **options)
        self.settle()
        assert recorder.tokens == expected_outputs(prompt, count)
        return recorder.cached

    def send(self):
        """Begin a step; the worker has not looked at it yet."""
        self.core.step()
        self.manager.check()
        self.store.go_on(self._random)

    def work(self):
        """The worker runs the batch in flight, if there is one."""
        if self.harness.sent:
            self.harness.work(self.harness.sent.pop())
            self.store.go_on(self._random)

    def answer(self):
        """The store answers one command."""
        self.store.answer(self._random)

    def answer_question(self):
        for answer in self.store._query(self.store.questions.popleft(), False, False, 0.0):
            self._hear(answer)

    def settle(self):
        """Until there is nothing left to do."""
        while True:
            self.send()
            if not self.store.is_idle:
                self.answer()
            elif self.harness.sent:
                self.work()
            elif not self.core.is_idle or not self.tier.is_idle or (self._states and self.tier._stores.num_waiting):
                left = self.core.seconds_to_next_deadline()
                assert left is not None, "nothing will ever happen"
                self.clock.now += left + 0.001
            else:
                break
        assert self.core.check()["idle"]
        self.manager.check_idle()
        assert self.manager.stats().device_loading_blocks == 0


class HostTierServer(StorageServer):
    backend, tiers = "file", (16, 16)


class AttentionStoreServer(StorageServer):
    backend, tiers = "attention_store", (24, 0)
