"""Engine core and shadow worker with an attention store tier."""

import random

from fastdeploy_kvcache_v1.attention.base import CacheLayout, RoleSpec
from fastdeploy_kvcache_v1.config import KVCacheConfig, WritePolicy
from fastdeploy_kvcache_v1.storage.attention_store.tier import AttentionStoreTier
from fastdeploy_kvcache_v1.storage.namespace import Namespace
from fastdeploy_kvcache_v1.storage.settings import StorageSettings
from tests.embedded.engine.storage_server import BLOCK, StorageServer
from tests.embedded.token_shadow_store import TokenShadowStore

SHAPE = (1, BLOCK, 2)
LAYOUT = CacheLayout(1, (RoleSpec("key", SHAPE, "float32"), RoleSpec("value", SHAPE, "float32")))


def namespace(epoch="0"):
    return Namespace("m", epoch, LAYOUT, BLOCK, 1, "test", "1")


class AttentionStoreServer(StorageServer):
    def __init__(
        self, *, device=24, host=0, stored=None, seed=0, prefetch="timeout", min_tokens=4, flush_only=False, **options
    ):
        self._seed = seed
        self._settings = StorageSettings(
            "attention_store", prefetch=prefetch, min_tokens=min_tokens, flush_only=flush_only
        )
        events = KVCacheConfig.max_queued_events if flush_only else 0
        config = KVCacheConfig(
            device, host, block_size=BLOCK, write_policy=WritePolicy.WRITE_BACK, max_queued_events=events
        )
        super().__init__(config, stored=stored, **options)

    def make_tier(self, manager, worker):
        self.store = TokenShadowStore(worker, BLOCK, self.clock, random.Random(self._seed))
        return AttentionStoreTier(manager, self._settings, namespace(), self.store, clock=self.clock)

    def send(self):
        super().send()
        self.store.look()

    def work(self):
        """The worker runs the batch in flight, if there is one."""
        if self.harness.sent:
            batch = self.harness.sent.pop()
            self.store.look()
            result = self.harness.worker.run(batch)
            self.store.look()
            self.core.on_step_result(result)
            self.manager.check()

    def answer(self):
        self.core.on_storage(self.store.answer())
        self.manager.check()

    @property
    def num_statements(self):
        """That the index has not taken yet."""
        return self.tier._stores.num_waiting if self._settings.flush_only else 0

    def settle(self):
        while True:
            self.send()
            if not self.store.is_idle:
                self.answer()
            elif self.harness.sent:
                self.work()
            elif not self.core.is_idle or not self.tier.is_idle or self.num_statements:
                left = self.core.seconds_to_next_deadline()
                assert left is not None, "nothing will ever happen"
                self.clock.now += left + 0.001
            else:
                break
        assert self.core.check()["idle"]
        self.manager.check_idle()
        assert self.manager.stats().quarantined_blocks == 0
