"""FAKE processes of a host during weight updates of its legacy API, stepped in any order by one seeded chooser.

Each actor is a generator that yields wherever another process or thread may run: the API, the worker's event loop, the
schedule loop, the thread that reads tokens, and ours. What they do, and in which order, is the host's. Two things are
left to the seconds that API and worker sleep in between: when an update is asked for, the worker has left the function
that cleared its weights (the host would hang), and when it begins, every token sent before has been read.

`host` has `worker` (a FakeWorker), `cache`, and `schedule`, `confirm`, `take_tokens`, `check`.
"""

import pickle
import threading
from types import SimpleNamespace

from fastdeploy_kvcache_v1.fastdeploy_integration.engine import patches as engine_patches
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.lost_batches import Transit
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.same_id import HeldBack
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.weight_updates import (
    CLEARED,
    CLEARING,
    NORMAL,
    UPDATING,
    WeightUpdates,
)

from .fake_scheduler import Control, FakeScheduler, Kind, Status


class FakeResourceManager(FakeScheduler):
    """A FAKE: the scheduler whose batches travel, with the parts of ResourceManagerV1 that a restart uses."""

    def __init__(self, cache, **settings):
        super().__init__(cache, **settings)
        self.cache_manager = cache
        cache.publisher = SimpleNamespace(publish=lambda: None)
        cache.updates, cache.epoch = None, 0
        cache.transit, cache.held_back, cache.arrivals = Transit(cache), HeldBack(), threading.Lock()
        cache.followers = self.followers
        cache.take_reports = lambda: None  # workers have no way back here
        self.lock = threading.Lock()
        self.requests, self.tasks_list = {}, [None] * self.seats
        self.waiting_abort_req_id_set = self.aborting
        self.to_be_aborted_req_id_set, self.to_be_rescheduled_request_id_set = set(), set()
        self.num_unconfirmed = self.num_aborted = 0

    def add(self, task):
        engine_patches.add_request(self._add, self, (task,), {})

    def add_request(self, task):
        self.add(task)

    def _add(self, task):
        super().add(task)
        self.requests[task.request_id] = task

    def schedule(self):
        def schedule():
            scheduled_reqs, self.tokens_left = [], self.budget
            self._schedule_all(scheduled_reqs)
            return scheduled_reqs, []

        return engine_patches.schedule(schedule, self, (), {})

    def _schedule_all(self, batch):
        preempted = self._schedule_running(batch)
        self.to_be_rescheduled_request_id_set.update(task.request_id for task in preempted)
        if not preempted:
            self._schedule_waiting(batch)
        for task in batch:
            if task.task_type is Kind.ABORT:
                self.aborting.discard(task.request_id)
                self.to_be_aborted_req_id_set.add(task.request_id)
                self.requests[task.request_id].status = Status.PREEMPTED
                self.requests[task.request_id].num_computed_tokens = 0

    def confirm(self, preempted, aborted):
        for request_id in preempted:
            self.reschedule_preempt_task(request_id)
        for request_id in aborted:
            self.to_be_aborted_req_id_set.remove(request_id)
            del self.requests[request_id]
            self.num_aborted += 1

    def take_tokens(self, sampled):
        self._take_tokens(sampled)

    def finish(self, task):
        super().finish(task)
        del self.requests[task.request_id]
        self.aborting.discard(task.request_id)

    def preempted_all(self):
        self.num_unconfirmed += len(self.to_be_rescheduled_request_id_set) + len(self.to_be_aborted_req_id_set)
        tasks = []
        while self.running:
            victim = self.running.pop()
            victim.status, victim.num_computed_tokens = Status.PREEMPTED, 0
            self._free(victim)
            self._leave_seat(victim)
            self.to_be_rescheduled_request_id_set.add(victim.request_id)
            tasks.append(Control(Kind.PREEMPTED, victim))
        return tasks

    def _schedule_waiting(self, batch):
        super()._schedule_waiting(batch)
        for task in self.running:
            self.tasks_list[task.idx] = task

    def _free_blocks(self, task):
        self._free(task)
        self._leave_seat(task)

    def _prepare_preempt_task(self, task):
        return Control(Kind.PREEMPTED, task)

    def reschedule_preempt_task(self, request_id):
        with self.lock:
            if request_id in self.to_be_rescheduled_request_id_set and request_id in self.requests:
                self.to_be_rescheduled_request_id_set.remove(request_id)
                self.waiting.appendleft(self.requests[request_id])

    def check(self):
        self.cache.check()


class FakeQueue:
    """The host's task queue: one batch at a time."""

    def __init__(self):
        self.batch = None
        self.num_dropped = 0

    def exist_tasks(self):
        return self.batch is not None

    def put_tasks(self, tasks):
        assert self.batch is None, "the queue would wait for the worker here"
        self.batch = pickle.dumps(tasks)

    def take(self):
        tasks, _ = pickle.loads(self.batch)
        assert type(tasks) is list
        self.batch = None
        return tasks

    def clear_data(self):
        self.num_dropped += self.batch is not None
        self.batch = None


class Shared(list):
    """One number in shared memory: other processes may go on between two looks at it."""

    def __init__(self, meanwhile):
        super().__init__([NORMAL])
        self._meanwhile = meanwhile

    def __getitem__(self, index):
        self._meanwhile()
        return super().__getitem__(index)


class World:
    def __init__(self, host, rng, *, updates, patience, idle=200):
        """`patience`: steps after which the API gives up waiting. `idle`: at most so many before an update."""
        self.idle = idle
        self.host, self.rng, self.num_updates, self.patience = host, rng, updates, patience
        self.queue, self.messages = FakeQueue(), []
        self.weights, self.tree, self.copies = (SimpleNamespace(value=Shared(self._meanwhile)) for _ in range(3))
        self.heartbeats = SimpleNamespace(value=[0])
        self.num_given_up = self.num_updated = 0
        self.updates = WeightUpdates(
            host.cache, weights=self.weights, tree=self.tree, heartbeats=self.heartbeats, copies=self.copies
        )
        host.cache.updates = self.updates
        self.slow = None
        self.num_steps = 0
        self.is_checking = False
        self.processes = [self._api(), self._event_loop()]
        self.actors = [*self.processes, self._schedule_loop(), self._token_reader(), self._polls()]

    def step(self):
        """One actor, mostly another one than before; sometimes one of them is left out for a long time."""
        self.num_steps += 1
        if self.rng.random() < 0.03:
            self.slow = self.rng.choice(self.actors[1:])
        actor = self.rng.choice(self.actors)
        if actor is not self.slow or self.rng.random() < 0.03:
            next(actor)
            self.host.check()

    def _meanwhile(self):
        for process in self.processes:
            while not process.gi_running and self.rng.random() < 0.1:
                next(process)

    @property
    def is_done(self):
        return self.num_updates == 0 and self.weights.value[0] == NORMAL and self.tree.value[0] == NORMAL

    # ---- the API process

    def _api(self):
        while True:
            for _ in range(self.rng.randrange(self.idle)):
                yield
            yield from self._clear()
            for _ in range(self.rng.choice([0, 5, 100])):
                yield
            yield from self._update()
            if self.weights.value[0] == NORMAL and self.tree.value[0] == NORMAL:
                self.num_updates = max(0, self.num_updates - 1)
                self.num_updated += 1
            while self.num_updates == 0:
                if not self.is_done:  # the last one was given up: its user tries again
                    yield from self._update()
                yield

    def _clear(self):
        if self.weights.value[0] == NORMAL:
            self.weights.value[0] = CLEARING
            if not (yield from self._wait([self.weights, self.copies], CLEARED)):
                return
        if self.tree.value[0] == NORMAL:
            self.tree.value[0] = CLEARING
            yield from self._wait([self.tree], CLEARED)

    def _update(self):
        if self.weights.value[0] == CLEARED:
            while self.is_checking:
                yield
            self.weights.value[0] = UPDATING
            if not (yield from self._wait([self.weights, self.copies], NORMAL)):
                return
        if self.tree.value[0] == CLEARED:
            self.tree.value[0] = UPDATING
            yield from self._wait([self.tree], NORMAL)

    def _wait(self, signals, value):
        for _ in range(self.patience):
            if all(signal.value[0] == value for signal in signals):
                return True
            yield
        self.num_given_up += 1
        return False

    # ---- the worker process

    def _event_loop(self):
        while True:
            asked = self.weights.value[0]
            yield
            self.heartbeats.value[0] += 1
            yield
            if asked != NORMAL:
                self.copies.value[0] = asked
                self.is_checking = True
                yield from self._check_weights()
                self.is_checking = False
                yield
                self.queue.clear_data()
                yield
                while asked == CLEARING and (self.weights.value[0] != UPDATING or self.messages):
                    yield
                continue
            if self.queue.exist_tasks():
                preempted, aborted = self.host.worker.receive(self.queue.take())
                yield
                self.messages.append((preempted, aborted, {}))
            self.messages.append(([], [], self.host.worker.step()))
            yield

    def _check_weights(self):
        worker = self.host.worker
        while self.weights.value[0] not in (NORMAL, CLEARED):
            updating = self.weights.value[0] == UPDATING
            self.copies.value[0] = UPDATING if updating else CLEARING
            worker.rows.clear()
            yield
            worker.device, worker.host = {}, {}
            self.weights.value[0] = NORMAL if updating else CLEARED
            yield

    # ---- the engine process

    def _schedule_loop(self):
        while True:
            if not self.queue.exist_tasks():
                tasks, errors = self.host.schedule()
                assert not errors
                yield
                if tasks:
                    engine_patches.put_tasks(self.queue.put_tasks, self.queue, ((tasks, len(tasks)),), {})
            yield

    def _token_reader(self):
        while True:
            if self.messages:
                preempted, aborted, sampled = self.messages.pop(0)
                self.host.confirm(preempted, aborted)
                self.host.take_tokens(sampled)
            yield

    def _polls(self):
        while True:
            self.updates.poll()
            yield
