"""A FAKE scheduler as `storage_scheduler`, with a store that reads and fills device blocks while passes run late."""

from collections import deque
from functools import partial

from fastdeploy_kvcache_v1.fastdeploy_integration.engine.rank_passes import RankPasses
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.storage import EngineStorage
from fastdeploy_kvcache_v1.fastdeploy_integration.worker.pass_tracker import PassTracker
from fastdeploy_kvcache_v1.storage.attention_store.tier import AttentionStoreTier
from fastdeploy_kvcache_v1.storage.settings import StorageSettings
from tests.embedded.token_shadow_store import TokenShadowStore
from tests.fastdeploy_integration.worker.fake_worker import GARBAGE
from tests.storage.values import namespace

from .fake_scheduler import Control, FakeTask, Kind, Status
from .storage_scheduler import SlowWorker, StorageScheduler


class Pass:
    """Its content is there at once, as its stream has it; on the device it is when it has ended."""

    def __init__(self):
        self.used, self.written = set(), set()
        self.has_ended = False

    def done(self):
        return self.has_ended


class AsyncWorker(SlowWorker):
    """Passes end later than they are submitted, and copies from the device read until they end."""

    def __init__(self, block_size, clock):
        super().__init__(block_size)
        self.tracker = PassTracker(clock)
        self.running = deque()
        self._read = {}
        self._open = Pass()

    def receive(self, tasks):
        told = super().receive(tasks)
        self.tracker.taken(self.last_step)
        return told

    def step(self):
        sampled = super().step()
        if self._open.used:
            self.running.append(self._open)
            self.tracker.submitted(self._open)
            self._open = Pass()
        return sampled

    def _compute(self, row, end):
        table = row.table[: -(-end // self.block_size)]
        self._open.used.update(table)
        self._open.written.update(table[row.computed // self.block_size :])
        super()._compute(row, end)

    def _evict(self, step, copies):
        self._read[step] = set(copies.source_slots)
        super()._evict(step, copies)

    def let_arrive(self):
        self._read.pop(self._arriving[0][0])
        super().let_arrive()

    def end_pass(self):
        self.running.popleft().has_ended = True

    def is_written(self, slot):
        return any(slot in each.written for each in (*self.running, self._open))

    def is_used(self, slot):
        passes = (*self.running, self._open)
        return any(slot in used for used in (*(each.used for each in passes), *self._read.values()))

    @property
    def is_idle(self):
        return not any(
            not row.waits_for_chunk and row.computed < len(row.tokens) and self._has_block(row)
            for row in self.rows.values()
        )


class DeviceShadowStore(TokenShadowStore):
    """Notices a slot that it is given too early."""

    def answer(self):
        return [super().answer()]

    def _content(self, slot):
        assert not self._worker.is_written(slot), "what is stored is still being computed"
        return dict(self._worker.device.get(slot, {}))

    def _fill(self, slot, value):
        assert not self._worker.is_used(slot), "what is filled is still in use"
        self._worker.device[slot] = dict(GARBAGE if value is None else value)

    def _check(self, path, value):
        tokens = path[1]
        first = len(tokens) - self._size
        found = {position: content[1:] for position, content in value.items()}
        assert found == {each: tokens[: first + each + 1] for each in range(self._size)}, "not what its name says"


class BatchLostError(Exception):
    """The batch, in `args`, never reaches the queue."""


class AttentionScheduler(StorageScheduler):
    """Batches wait in the queue while the worker computes, with the rows that it knows, and some are lost before."""

    def _make_storage(self, prefetch, link):
        self.worker = AsyncWorker(self.block_size, self._clock)
        self.store = DeviceShadowStore(self.worker, self.block_size, self._clock, self.rng)
        passes = RankPasses(1, self._clock)
        settings = StorageSettings("attention_store", prefetch=prefetch, min_tokens=1)
        tier = AttentionStoreTier(self.cache.manager, settings, None, self.store, clock=self._clock, passes=passes)
        storage = EngineStorage(tier, link, lock=self.cache._lock, find_namespace=namespace, passes=passes)
        self.worker.receive = partial(self._receive_later, self.worker.receive)
        self.num_lost = 0
        self.loses = lambda: False
        """Asked before each batch."""
        self._is_scheduling = False
        self._again = []
        return storage

    def _receive_later(self, receive, tasks):
        for _ in range(int(6 * self.rng.random()) - 2):
            self._go_on_meanwhile()
            self._take_tokens(self.worker.step())
        self._go_on_meanwhile()
        if self._is_scheduling and self.loses():
            raise BatchLostError(tasks)
        told_again, self._again = self._again, []
        preempted, aborted = receive(tasks)
        for task in told_again:
            if task.task_type is Kind.PREEMPTED:
                preempted.remove(task.request_id)
                self.waiting.insert(0, self.manager.requests[task.request_id])
        return preempted, aborted

    def _clock(self):
        return self.now

    def _go_on_meanwhile(self):
        self.now += 0.03
        self._end_some()
        self._answer_some()
        if self._is_scheduling:
            self._report()
            self.storage.release(self.manager)
            self._answer_some()

    def _end_some(self):
        while self.worker.running and self.rng.random() < 0.5:
            self.worker.end_pass()

    def step(self):
        self._end_some()
        self.store.look()
        if self.running and self.rng.random() < 0.06:
            self.aborting.add(self.rng.choice(self.running).request_id)
        self._is_scheduling = True
        try:
            return super().step()
        except BatchLostError as lost:
            self._recover(*lost.args)
            return []
        finally:
            self._is_scheduling = False

    def _recover(self, tasks):
        """As `lost_batches.take_back`."""
        self.num_lost += 1
        self.cache.batch_lost()
        self._again = []
        for task in tasks:
            if task.task_type is not Kind.PREFILL:
                self._again.append(task)
            elif task in self.running:
                task.status, task.num_computed_tokens = Status.PREEMPTED, 0
                self._end(task)
                task.num_cached_blocks = 0
                self._again.append(Control(Kind.PREEMPTED, task))

    def reset(self):
        """Every row ends, those that the worker was not told of as well."""
        self._tell_again()
        super().reset()

    def _tell_again(self):
        again, self._again = self._again, []
        for request_id in self.worker.receive(again)[0]:
            self.waiting.insert(0, self.manager.requests[request_id])

    def _schedule_running(self, batch):
        self._again = [task for task in self._again if self._still_holds(task)]
        batch.extend(self._again)
        preempted = super()._schedule_running(batch)
        for task in batch:
            if task.task_type is Kind.ABORT:  # its blocks are free, and the worker goes on with it
                self.manager.requests.pop(task.request_id, None)
        is_abortion = any(task.task_type is Kind.ABORT for task in batch)
        if self._is_scheduling and (self.loses() or (is_abortion and self.rng.random() < 0.45)):  # `schedule` raises
            raise BatchLostError(batch)
        return preempted

    def _still_holds(self, task):
        request = self.manager.requests.get(task.request_id)
        return task.task_type in (Kind.PREEMPTED, Kind.ABORT) or (
            request is not None and request.block_tables is task.block_tables
        )

    def settle(self):
        """The last batch may have been lost: with the next one all is known."""
        self.loses = lambda: False
        self.add(FakeTask("last", [6] * 9, 1))
        self.run_dry()
        while self.worker.running:
            self.worker.end_pass()
        super().settle()

    def _passes(self):
        news = self.worker.tracker.news(is_idle=self.worker.is_idle)
        return {} if news is None or self.rng.random() < 0.3 else {0: news}
