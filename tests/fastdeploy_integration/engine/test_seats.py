"""Seats of preempted requests that wait: nobody else gets them, and they do not wait for ever."""

import threading
from collections import deque
from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1.fastdeploy_integration.engine import seats

from .fake_scheduler import FakeTask, Status


@pytest.mark.parametrize(
    ("status", "stop_flags", "seated", "expected"),
    [
        (Status.WAITING, [False, False], False, "not asked"),
        (Status.WAITING, [False, True], False, "matched"),
        (Status.PREEMPTED, [False, False], False, "matched"),
        (Status.WAITING, [False, False], True, "matched"),
    ],
)
def test_a_new_request_is_matched_and_started_only_when_there_is_a_seat(status, stop_flags, seated, expected):
    request = FakeTask("x", [1])
    request.status = status
    asked = []
    manager = SimpleNamespace(
        stop_flags=stop_flags,
        tasks_list=[None, seated and request],
        cache_manager=SimpleNamespace(may_match=lambda each: True),
    )
    matched = seats.get_prefix_cached_blocks(lambda each: not asked.append(each), manager, (request,), {})
    assert ("matched" if matched else "not asked") == expected
    assert asked == [request] * matched
    manager.cache_manager.num_gpu_blocks = 9
    assert seats.blocks_to_start(lambda each, blocks: blocks, manager, (request, 4), {}) == (4 if matched else 10)


def manager_of(waiting, *, num_seats, role="mixed", running=(), rescheduled=(), aborted=()):
    """All that is asked of FastDeploy's ResourceManagerV1: every request has a seat."""
    for idx, request in enumerate(waiting):
        request.idx = idx
    return SimpleNamespace(
        lock=threading.RLock(),
        waiting=deque(waiting),
        running=list(running),
        to_be_rescheduled_request_id_set=set(rescheduled),
        to_be_aborted_req_id_set=set(aborted),
        max_num_seqs=num_seats,
        tasks_list=[*waiting, *[None] * (num_seats - len(waiting))],
        stop_flags=[False] * len(waiting) + [True] * (num_seats - len(waiting)),
        req_dict={request.request_id: request.idx for request in waiting},
        config=SimpleNamespace(scheduler_config=SimpleNamespace(splitwise_role=role)),
    )


def preempted(request_id):
    request = FakeTask(request_id, [1] * 20)
    request.status, request.output_token_ids = Status.PREEMPTED, [7, 8]
    return request


def test_when_preempted_requests_wait_in_all_seats_one_of_them_starts_as_a_new_one():
    manager = manager_of([preempted("a"), preempted("b")], num_seats=2)
    seats.let_one_start(manager)
    first, last = manager.waiting
    assert (first.status, first.idx, manager.tasks_list[0]) == (Status.PREEMPTED, 0, first)
    assert (last.status, last.idx, manager.tasks_list[1]) == (Status.WAITING, None, None)
    assert last.need_prefill_tokens == 22, "with the tokens that it has generated"
    assert (manager.stop_flags, manager.req_dict) == ([False, True], {"a": 0})


def test_on_a_prefill_server_it_keeps_the_seat_that_its_request_has_from_the_beginning():
    manager = manager_of([preempted("a")], num_seats=1, role="prefill")
    seats.let_one_start(manager)
    (request,) = manager.waiting
    assert (request.status, request.idx, manager.tasks_list) == (Status.WAITING, 0, [request])
    assert (manager.stop_flags, manager.req_dict) == ([False], {"a": 0})


@pytest.mark.parametrize(
    "others",
    [
        {"num_seats": 3},
        {"num_seats": 2, "running": ["x"]},
        {"num_seats": 2, "rescheduled": ["x"]},
        {"num_seats": 2, "aborted": ["x"]},
    ],
    ids=["a free seat", "one runs", "one is not yet preempted", "one is about to leave"],
)
def test_what_comes_to_an_end_by_itself_is_left_alone(others):
    manager = manager_of([preempted("a"), preempted("b")], **others)
    seats.let_one_start(manager)
    assert [request.status for request in manager.waiting] == [Status.PREEMPTED] * 2
    assert manager.req_dict == {"a": 0, "b": 1}


def test_one_may_start_before_each_schedule(monkeypatch):
    manager, steps = manager_of([preempted("a")], num_seats=1), []
    monkeypatch.setattr(seats, "schedule", lambda *given: steps.append(given[1].waiting[0].status) or "scheduled")
    assert seats.schedule_with_a_seat(None, manager, (), {}) == "scheduled"
    assert steps == [Status.WAITING]
