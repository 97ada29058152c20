"""A FAKE scheduler as `fake_scheduler`, with a storage tier whose store, copies and reports take their time."""

import threading
from collections import deque
from types import SimpleNamespace

from fastdeploy_kvcache_v1.fastdeploy_integration.engine.copy_reports import CopyNews
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.storage import EngineStorage
from fastdeploy_kvcache_v1.storage.engine.tier import StorageTier
from fastdeploy_kvcache_v1.storage.settings import StorageSettings
from tests.embedded.shadow_store import ShadowStore
from tests.fastdeploy_integration.worker.fake_worker import GARBAGE, FakeWorker
from tests.storage.values import namespace

from .fake_scheduler import FakeScheduler


class SlowWorker(FakeWorker):
    """What leaves the device is read at once, as the order of streams has it, and reaches the host later."""

    def __init__(self, block_size):
        super().__init__(block_size)
        self._arriving = deque()

    def _reach_host(self, step, content):
        self._arriving.append((step, content))

    def _swap_in(self, copies):
        while any(slot in content for _, content in self._arriving for slot in copies.source_slots):
            self.let_arrive()
        super()._swap_in(copies)

    def let_arrive(self):
        """The oldest copy into the host ends."""
        self.host.update(self._arriving.popleft()[1])

    @property
    def is_copying(self):
        return bool(self._arriving)

    @property
    def ended_through(self):
        return self._arriving[0][0] - 1 if self._arriving else self.last_step


class StorageScheduler(FakeScheduler):
    """`rng` decides when answers and reports come, and which reports are lost."""

    def __init__(self, cache, rng, *, prefetch="wait_complete", **options):
        super().__init__(cache, **options)
        self.rng = rng
        self.now = 0.0
        self._listener = None
        self.manager = SimpleNamespace(
            requests={},
            waiting_abort_req_id_set=set(),
            to_be_rescheduled_request_id_set=set(),
            waiting=self.waiting,
            lock=threading.RLock(),
        )
        link = SimpleNamespace(is_ready=True, listen=self._set_listener, close=lambda: None)
        self.storage = self._make_storage(prefetch, link)
        cache.use_storage(self.storage)
        self.storage.start()
        while not self.store.namespace:  # a thread finds it
            self.storage.release(self.manager)

    def _make_storage(self, prefetch, link):
        self.worker = SlowWorker(self.block_size)
        self.store = ShadowStore(self.worker, self.rng, garbage=GARBAGE)
        settings = StorageSettings("file", "/unused", prefetch=prefetch, min_tokens=1)
        tier = StorageTier(self.cache.manager, settings, None, self.store, clock=lambda: self.now)
        return EngineStorage(tier, link, lock=self.cache._lock, find_namespace=namespace)

    def _set_listener(self, listener):
        self._listener = listener

    def add(self, task):
        self.manager.requests[task.request_id] = task
        if not self.cache.waits_for_storage(task):
            super().add(task)

    def step(self):
        self.now += 0.1
        self._answer_some()
        while self.worker.is_copying and self.rng.random() < 0.5:
            self.worker.let_arrive()
        self._report()
        for task in self.storage.release(self.manager):
            self.waiting.append(task)
            self.storage.queued(task)
        return super().step()

    def _answer_some(self):
        while not self.store.is_idle and self.rng.random() < 0.6:
            self._answer()

    def _answer(self):
        for answer in self.store.answer():
            self._listener(answer)

    def _report(self):
        """How far copies are is said now and then; what failed at once, before anybody asks for it back."""
        failed, self.worker.failed = tuple(self.worker.failed), []
        through = {} if self.rng.random() < 0.3 else {0: self.worker.ended_through}
        if failed:
            self.cache.host_copies_failed(failed)
        self.storage.copies_reported(CopyNews(failed, through, -1, self._passes()))

    def _passes(self):
        """What is heard of passes."""
        return {}

    def finish(self, task):
        super().finish(task)
        del self.manager.requests[task.request_id]

    def run_dry(self, limit=4000):
        while self.manager.requests:
            self.step()
            limit -= 1
            assert limit, "the scheduler makes no progress"

    def settle(self):
        """Let everything end that is under way."""
        while not (self.store.is_idle and self.storage.tier.is_idle):
            self.now += 100.0
            if self.worker.is_copying:
                self.worker.let_arrive()
            while not self.store.is_idle:
                self._answer()
            self._report()
            self.storage.release(self.manager)
