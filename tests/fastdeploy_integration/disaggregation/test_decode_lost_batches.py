"""Batches of a decode server that are lost: requests that they preempt, or begin, leave it."""

import threading
from collections import deque
from types import SimpleNamespace

from fastdeploy_kvcache_v1.fastdeploy_integration.engine.lost_batches import Transit
from tests.fastdeploy_integration.engine.fake_scheduler import Control, FakeTask, Kind, Status


class Manager:
    """What of ResourceManagerV1 a lost batch concerns."""

    def __init__(self, *running):
        self.lock, self.running, self.waiting = threading.Lock(), list(running), deque()
        self.requests = {each.request_id: each for each in running}
        self.tasks_list, self.req_dict = list(running), {each.request_id: each.idx for each in running}
        self.stop_flags = [False] * len(running)
        self.to_be_rescheduled_request_id_set, self.to_be_aborted_req_id_set = set(), set()
        self.freed = []

    def _free_blocks(self, request):
        self.freed.append(request.request_id)

    def _prepare_preempt_task(self, request):
        return Control(Kind.PREEMPTED, request)


def request(request_id, idx=0):
    task = FakeTask(request_id, [1] * 8)
    task.idx, task.status = idx, Status.RUNNING
    return task


def lose(manager, *tasks):
    """Returns the batch that follows."""
    cache = SimpleNamespace(preempted_leave=True, batch_lost=lambda: None)
    transit = Transit(cache)
    transit.depart(manager, list(tasks))
    transit.recover(manager)
    return [(each.task_type, each.request_id) for each in transit.depart(manager, [])]


def test_a_request_that_a_lost_batch_begins_leaves_and_its_client_is_told():
    """FastDeploy answers when it sends the task. Computed here it would be without a client."""
    first, other = request("a", 0), request("b", 1)
    manager = Manager(first, other)
    assert lose(manager, first) == [(Kind.PREEMPTED, "a")]
    assert (manager.freed, manager.running, list(manager.requests)) == (["a"], [other], ["b"])
    assert (manager.tasks_list, manager.stop_flags, manager.req_dict) == ([None, other], [True, False], {"b": 1})
    assert not manager.to_be_rescheduled_request_id_set
    assert not manager.waiting


def test_the_worker_is_told_again_of_a_preemption_that_was_lost():
    """FastDeploy has forgotten the request, whose row writes to blocks that others have now."""
    manager = Manager()
    assert lose(manager, Control(Kind.PREEMPTED, request("a"))) == [(Kind.PREEMPTED, "a")]
