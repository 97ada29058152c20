"""Weight updates of FastDeploy's legacy API, line by line. In every order of events: tests/world/weight_updates.py."""

import pickle
import threading
from types import SimpleNamespace

import pytest

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

from .by_hand import Server


class Signals:
    """`steps`: what the thread and `put` did, in order."""

    def __init__(self, *, num_ranks=1):
        self.num_dropped = 0
        self.weights, self.tree, self.copies = (SimpleNamespace(value=[NORMAL]) for _ in range(3))
        self.heartbeats = SimpleNamespace(value=[7] * num_ranks)
        self.updates = WeightUpdates(
            self, weights=self.weights, tree=self.tree, heartbeats=self.heartbeats, copies=self.copies
        )
        self.enter = self.updates.enter

    def batch_dropped(self):
        self.num_dropped += 1

    def set(self, **values):
        for name, value in values.items():
            getattr(self, name).value[0] = value
        self.updates.poll()

    def put(self, epoch, put, is_full=lambda: False):
        cache = SimpleNamespace(updates=self.updates, transit=SimpleNamespace(sent=lambda: None))
        queue = SimpleNamespace(exist_tasks=is_full)
        engine_patches.put_tasks(put, queue, ((Batch(["task"], cache, epoch), 1),), {})


def test_an_update_from_line_to_line():
    signals = Signals(num_ranks=2)
    assert signals.enter() == 0
    signals.weights.value[0] = CLEARING
    assert signals.enter() is None, "at once, not with the next poll"
    signals.set(weights=CLEARED, copies=CLEARING)
    assert (signals.copies.value[0], signals.num_dropped) == (CLEARED, 0)
    signals.set(tree=CLEARING)
    assert (signals.tree.value[0], signals.num_dropped) == (CLEARED, 1)
    signals.set(weights=UPDATING, copies=UPDATING)
    signals.set(weights=NORMAL)
    assert (signals.copies.value[0], signals.tree.value[0], signals.enter()) == (NORMAL, CLEARED, None)
    signals.set(tree=UPDATING)
    signals.heartbeats.value[0] = 8
    signals.set()
    assert (signals.tree.value[0], signals.enter()) == (UPDATING, None), "a rank may still drop what is queued"
    signals.heartbeats.value[1] = 8
    signals.set()
    assert (signals.tree.value[0], signals.enter()) == (NORMAL, 1)


def test_a_cleared_tree_alone_makes_nobody_start_again():
    """The workers have forgotten nothing: a second start of their requests would be one too many."""
    signals = Signals()
    signals.set(tree=CLEARING)
    assert (signals.tree.value[0], signals.num_dropped, signals.enter()) == (CLEARED, 1, None)
    signals.set(tree=UPDATING, heartbeats=8)
    assert signals.enter() == 0


def test_the_cache_is_cleared_before_it_is_said_and_the_thread_survives_a_failure():
    signals, failed, seen = Signals(), threading.Event(), []

    def fail_once():
        seen.append(signals.tree.value[0])
        if not failed.is_set():
            failed.set()
            raise RuntimeError("once")

    signals.batch_dropped = fail_once
    with pytest.raises(RuntimeError):
        signals.set(weights=CLEARED, tree=CLEARING)
    failed.clear()
    before = {*threading.enumerate()}
    signals.updates.start()
    (thread,) = {*threading.enumerate()} - before
    while signals.tree.value[0] != CLEARED:
        pass
    signals.updates.stop()
    thread.join(10)
    assert not thread.is_alive()
    assert thread.daemon, "it keeps no process alive"
    assert seen == [CLEARING] * 3


def test_the_tree_is_not_cleared_while_a_batch_is_put():
    signals, tree = Signals(), []

    def put(tasks):
        signals.weights.value[0], signals.tree.value[0] = CLEARED, CLEARING
        clearing = threading.Thread(target=signals.updates.poll)
        clearing.start()
        clearing.join(0.05)  # as far as it gets
        tree.append((signals.tree.value[0], clearing))

    signals.put(signals.enter(), put)
    ((status, clearing),) = tree
    clearing.join(10)
    assert (status, signals.tree.value[0]) == (CLEARING, CLEARED)


def test_a_batch_that_waits_for_room_does_not_hold_up_the_clear():
    signals, batches, clearing = Signals(), [], []

    def is_full():
        signals.weights.value[0], signals.tree.value[0] = CLEARED, CLEARING
        clearing.append(threading.Thread(target=signals.updates.poll))
        clearing[-1].start()
        return True

    signals.put(signals.enter(), batches.append, is_full)
    for thread in clearing:
        thread.join(10)
    assert (signals.tree.value[0], batches) == (CLEARED, [])


def test_other_things_are_put_as_ever():
    assert engine_patches.put_tasks(lambda tasks: tasks, None, (), {"tasks": (["request"], 1)}) == (["request"], 1)


def test_a_batch_travels_as_a_plain_list():
    batch = Batch([1, 2], Signals(), 0)
    copy = pickle.loads(pickle.dumps(batch))
    assert (batch, type(copy), copy) == ([1, 2], list, [1, 2])


def test_requests_start_again_in_order_of_arrival_and_those_that_have_ended_do_not():
    server = Server(24)
    host = server.manager
    tasks = {name: server.add(name, [1] * 4, 50) for name in "abcd"}
    server.step()
    server.add("late", [1])
    for name, ids in (("b", host.to_be_rescheduled_request_id_set), ("c", host.to_be_aborted_req_id_set)):
        host.running.remove(tasks[name])
        host._free_blocks(tasks[name])
        ids.add(name)  # and the worker never said that it had noticed
    host.to_be_aborted_req_id_set.add("gone")  # 2.5 keeps the id of a request that ended before its abortion
    start_again(host)
    assert [task.request_id for task in host.waiting] == ["a", "b", "c", "d", "late"]
    assert (host.running, host.to_be_rescheduled_request_id_set) == ([], set())
    assert (host.waiting_abort_req_id_set, host.to_be_aborted_req_id_set) == ({"c"}, set())
    assert {task.need_prefill_tokens for task in tasks.values()} == {5}, "with what they have generated"
    assert all(host.stop_flags)
    server.cache.manager.check_idle()
