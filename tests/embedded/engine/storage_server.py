"""Engine core and shadow worker with a storage tier, over a store that answers when the test says so."""

from __future__ import annotations

import random
from typing import Any

from fastdeploy_kvcache_v1.attention.base import CacheLayout, RoleSpec
from fastdeploy_kvcache_v1.config import KVCacheConfig, WritePolicy
from fastdeploy_kvcache_v1.storage.engine.tier import StorageTier
from fastdeploy_kvcache_v1.storage.namespace import Namespace
from fastdeploy_kvcache_v1.storage.settings import StorageSettings
from tests.embedded.shadow import Harness, expected_outputs
from tests.embedded.shadow_store import ShadowStore

BLOCK = 4
LAYOUT = CacheLayout(1, (RoleSpec("key", (1, BLOCK, 2), "float32"),))
NAMESPACE = Namespace("m", "0", LAYOUT, BLOCK, 1, "test", "1")


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class StorageServer:
    """Servers may share what is stored. A subclass chooses the tier and its store."""

    store: Any

    def __init__(self, config, *, stored, **options):
        self.clock = Clock()

        def storage(manager, worker):
            tier = self.make_tier(manager, worker)
            if stored is not None:
                self.store.values = stored
            return tier

        self.harness = Harness(config, storage=storage, **options)
        self.core, self.tier, self.manager = self.harness.core, self.harness.storage, self.harness.manager

    def make_tier(self, manager, worker) -> StorageTier:
        """Sets `store`, too."""
        raise NotImplementedError

    def ask(self, name, prompt, count=2, **options):
        """A whole request, and everything that the store does for it; how many tokens were cached."""
        recorder = self.harness.submit(name, prompt, count, **options)
        self.settle()
        assert recorder.tokens == expected_outputs(prompt, count)
        return recorder.deltas[-1].usage.cached_tokens

    def send(self):
        """Begin a step; the worker has not looked at it yet."""
        self.core.step()
        self.manager.check()

    def work(self):
        """The worker runs the batch in flight, if there is one."""
        if self.harness.sent:
            self.core.on_step_result(self.harness.worker.run(self.harness.sent.pop()))
            self.manager.check()

    def answer(self):
        for answer in self.store.answer():
            self.core.on_storage(answer)
            self.manager.check()

    def settle(self):
        """Until there is nothing left to do."""
        raise NotImplementedError


class HostTierServer(StorageServer):
    """Over a store of the host tier."""

    def __init__(self, *, device=16, host=16, stored=None, seed=0, prefetch="timeout", min_tokens=4, **options):
        self._seed = seed
        self._settings = StorageSettings("file", "/unused", prefetch=prefetch, min_tokens=min_tokens)
        config = KVCacheConfig(device, host, block_size=BLOCK, write_policy=WritePolicy.WRITE_THROUGH)
        super().__init__(config, stored=stored, **options)

    def make_tier(self, manager, worker):
        self.store = ShadowStore(worker, random.Random(self._seed))
        return StorageTier(manager, self._settings, NAMESPACE, self.store, clock=self.clock)

    def settle(self):
        while True:
            if not self.store.is_idle:
                self.answer()
            elif self.harness.step() is None and self.store.is_idle:
                break
        assert self.core.is_idle
        assert self.tier.is_idle
        self.manager.check_idle()
