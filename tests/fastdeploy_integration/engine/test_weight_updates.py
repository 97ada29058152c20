"""Weight updates of the host's legacy API, against FAKE processes whose events overlap in every way."""

import pickle
import random
import threading
from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1.config import WritePolicy
from fastdeploy_kvcache_v1.fastdeploy_integration.engine import patches as engine_patches
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.lost_batches import Batch
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.weight_updates import (
    CLEARED,
    CLEARING,
    NORMAL,
    UPDATING,
    WeightUpdates,
    start_again,
)

from .fake_scheduler import FakeTask, make_adapter
from .fake_weight_update import FakeResourceManager, World


def prompt(rng):
    start = [rng.randrange(4)] * rng.randrange(60)
    return start + [rng.randrange(50) for _ in range(rng.randrange(1, 12))]


def live(rng, policy, *, updates, patience):
    """Requests come and go through so many updates, until the last one has ended. Returns (world, manager)."""
    cache = make_adapter(24, 60, write_policy=policy, write_through_threshold=1)
    manager = FakeResourceManager(cache)
    world = World(manager, rng, updates=updates, patience=patience)
    prompts = {}
    while manager.requests or not world.is_done:
        if rng.random() < 0.05 and len(manager.requests) < 10 and not world.is_done:
            task = FakeTask(f"r{len(prompts)}", prompt(rng), rng.randrange(1, 20))
            prompts[task.request_id] = list(task.prompt_token_ids)
            manager.add(task)
        if rng.random() < 0.0005 and manager.running:
            manager.aborting.add(rng.choice(manager.running).request_id)
        world.step()
        assert world.num_steps < 10_000 * updates, f"lost: {sorted(manager.requests)}"
    cache.manager.check_idle()
    assert len(manager.finished) + manager.num_aborted == len(prompts)
    for name, task in manager.finished.items():
        tokens = prompts[name]
        for token in task.output_token_ids:
            assert token == hash(tuple(tokens)) % 7 + 1
            tokens = [*tokens, token]
    return world, manager


@pytest.mark.parametrize("patience", [10_000, 40])
@pytest.mark.parametrize("policy", [policy.value for policy in WritePolicy])
def test_updates_while_requests_run_and_arrive(policy, patience):
    """Nobody reads a block that was not computed since, no token changes, every request ends."""
    rng = random.Random(f"{policy} {patience}")
    world, manager = live(rng, policy, updates=60, patience=patience)
    assert world.num_updated >= 60
    assert (world.num_given_up > 0) == (patience == 40)
    worker = manager.worker
    assert min(world.queue.num_dropped, worker.num_swapped_out, worker.num_swapped_in, manager.num_aborted) > 0
    assert len(manager.finished) > 50


class FakeCache:
    def __init__(self):
        self.num_dropped = 0

    def batch_dropped(self):
        self.num_dropped += 1


class Signals:
    def __init__(self, *, num_ranks=1):
        self.cache = FakeCache()
        self.weights, self.tree, self.copies = (SimpleNamespace(value=[NORMAL]) for _ in range(3))
        self.heartbeats = SimpleNamespace(value=[7] * num_ranks)
        self.updates = WeightUpdates(
            self.cache, weights=self.weights, tree=self.tree, heartbeats=self.heartbeats, copies=self.copies
        )

    def set(self, **values):
        for name, value in values.items():
            getattr(self, name).value[0] = value
        self.updates.poll()


def test_an_update_from_line_to_line():
    signals = Signals(num_ranks=2)
    enter = signals.updates.enter
    assert enter() == 0
    signals.weights.value[0] = CLEARING
    assert enter() is None  # at once, not with the next poll
    signals.set(weights=CLEARED, copies=CLEARING)
    assert (signals.copies.value[0], signals.cache.num_dropped) == (CLEARED, 0)
    signals.set(tree=CLEARING)
    assert (signals.tree.value[0], signals.cache.num_dropped) == (CLEARED, 1)
    signals.set(weights=UPDATING, copies=UPDATING)
    signals.set(weights=NORMAL)
    assert (signals.copies.value[0], signals.tree.value[0], enter()) == (NORMAL, CLEARED, None)
    signals.set(tree=UPDATING)
    signals.heartbeats.value[0] = 8
    signals.set()
    assert (signals.tree.value[0], enter()) == (UPDATING, None)  # a rank may still drop what is queued
    signals.heartbeats.value[1] = 8
    signals.set()
    assert (signals.tree.value[0], enter()) == (NORMAL, 1)


def test_heartbeats_of_the_worker_before_its_weights_were_back_do_not_count():
    signals = Signals()
    for beat, status in enumerate([CLEARING, CLEARED, UPDATING, NORMAL]):
        signals.heartbeats.value[0] = beat
        signals.set(weights=status)
    assert signals.updates.enter() is None
    signals.set(heartbeats=9)
    assert signals.updates.enter() == 1


def test_a_clear_that_the_api_gave_up_is_an_update_all_the_same():
    """The tree's status never changes then, so whoever looks only there keeps what old weights computed."""
    signals, manager = Signals(), FakeResourceManager(make_adapter(24, 24, write_policy="write_through"))
    manager.cache.updates = signals.updates

    def serve(name):
        manager.add(FakeTask(name, [1] * 24))
        while manager.requests:
            for task in manager.schedule()[0]:
                assert manager.worker.receive([task]) == ([], [])
            manager.cache.transit.sent()
            manager.take_tokens(manager.worker.step())

    serve("cold")
    serve("warm")
    assert manager.worker.num_prefilled == 24 + 4
    for status in (CLEARING, CLEARED, UPDATING, NORMAL):
        signals.set(weights=status)
    signals.set(heartbeats=8)
    assert signals.cache.num_dropped == 0
    serve("new weights")
    assert manager.worker.num_prefilled == 24 + 4 + 24


def test_a_clear_that_comes_while_the_thread_looks_is_not_overlooked():
    signals = Signals()
    for status in (CLEARED, NORMAL):
        signals.set(weights=status)

    class Heartbeats:
        @property
        def value(self):
            signals.weights.value[0], signals.tree.value[0] = CLEARED, CLEARING
            return [8]

    signals.updates._heartbeats = Heartbeats()
    signals.set()
    assert (signals.tree.value[0], signals.updates.enter()) == (CLEARING, None)
    signals.set()
    assert signals.tree.value[0] == CLEARED


def test_a_cleared_tree_alone_makes_nobody_start_again():
    """The workers have forgotten nothing: a second start of their requests would be one too many."""
    signals = Signals()
    signals.set(tree=CLEARING)
    assert (signals.tree.value[0], signals.cache.num_dropped, signals.updates.enter()) == (CLEARED, 1, None)
    signals.set(tree=UPDATING, heartbeats=8)
    assert signals.updates.enter() == 0


def test_the_cache_is_cleared_before_it_is_said():
    signals = Signals()

    def fail():
        raise RuntimeError("no")

    signals.cache.batch_dropped = fail
    with pytest.raises(RuntimeError):
        signals.set(weights=CLEARED, tree=CLEARING)
    assert signals.tree.value[0] == CLEARING


def test_the_thread_answers_and_survives_a_failure():
    signals = Signals()
    failed = threading.Event()

    def fail_once():
        signals.cache.batch_dropped = lambda: None
        failed.set()
        raise RuntimeError("once")

    signals.cache.batch_dropped = fail_once
    signals.weights.value[0], signals.tree.value[0] = CLEARED, CLEARING
    signals.updates.start()
    assert failed.wait(10)
    while signals.tree.value[0] != CLEARED:
        pass
    signals.updates.stop()


def put(signals, epoch, queue):
    cache = SimpleNamespace(updates=signals.updates, transit=SimpleNamespace(sent=lambda: None))
    batch = Batch(["task"], cache, epoch)
    engine_patches.put_tasks(queue.put_tasks, queue, ((batch, 1),), {})


class SlowQueue:
    """The queue, with a reader that has not read yet, and a writer who takes his time."""

    def __init__(self):
        self.is_full = False
        self.batches = []
        self.asked, self.writing, self.go_on = threading.Event(), threading.Event(), threading.Event()
        self.go_on.set()

    def exist_tasks(self):
        self.asked.set()
        return self.is_full

    def put_tasks(self, tasks):
        self.writing.set()
        assert self.go_on.wait(10)
        self.batches.append(tasks)


def test_a_batch_from_before_the_clear_is_not_put_after_it():
    signals, queue = Signals(), SlowQueue()
    epoch = signals.updates.enter()
    signals.set(weights=CLEARING)
    put(signals, epoch, queue)
    assert queue.batches == []


def test_the_tree_is_not_cleared_while_a_batch_is_put():
    signals, queue = Signals(), SlowQueue()
    queue.go_on.clear()
    putting = threading.Thread(target=put, args=(signals, signals.updates.enter(), queue))
    putting.start()
    assert queue.writing.wait(10)
    signals.weights.value[0], signals.tree.value[0] = CLEARED, CLEARING
    clearing = threading.Thread(target=signals.updates.poll)
    clearing.start()
    clearing.join(0.05)
    assert (signals.tree.value[0], queue.batches) == (CLEARING, [])
    queue.go_on.set()
    for thread in (putting, clearing):
        thread.join(10)
    assert (signals.tree.value[0], len(queue.batches)) == (CLEARED, 1)


def test_a_batch_that_waits_for_room_does_not_hold_up_the_clear():
    signals, queue = Signals(), SlowQueue()
    queue.is_full = True
    putting = threading.Thread(target=put, args=(signals, signals.updates.enter(), queue))
    putting.start()
    assert queue.asked.wait(10)
    signals.set(weights=CLEARED, tree=CLEARING)
    assert signals.tree.value[0] == CLEARED
    queue.is_full = False
    putting.join(10)
    assert queue.batches == []


def test_other_things_are_put_as_ever():
    queue = SlowQueue()
    control = (["control request"], 1)
    engine_patches.put_tasks(queue.put_tasks, queue, (), {"tasks": control})
    assert queue.batches == [control]


def test_a_batch_travels_as_a_plain_list():
    batch = Batch([1, 2], Signals(), 0)
    assert batch == [1, 2]
    copy = pickle.loads(pickle.dumps(batch))
    assert (type(copy), copy) == (list, [1, 2])


def test_requests_start_again_in_order_of_arrival():
    manager = FakeResourceManager(make_adapter(24))
    for name in "abcd":
        manager.add(FakeTask(name, [1] * 4, 50))
    manager.schedule()
    manager.add(FakeTask("late", [1]))
    manager._end(manager.requests["b"])  # preempted, and the worker never said that it had noticed
    manager.to_be_rescheduled_request_id_set.add("b")
    manager._end(manager.requests["c"])
    manager.to_be_aborted_req_id_set.add("c")
    start_again(manager)
    assert [task.request_id for task in manager.waiting] == ["a", "b", "c", "d", "late"]
    assert (manager.running, manager.to_be_rescheduled_request_id_set) == ([], set())
    assert (manager.aborting, manager.to_be_aborted_req_id_set) == ({"c"}, set())
    manager.cache.manager.check_idle()
