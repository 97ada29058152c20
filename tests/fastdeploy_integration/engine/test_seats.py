"""Seats of preempted requests that wait: nobody else gets them, and they do not wait for ever."""

from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1.fastdeploy_integration.engine import seats

from .by_hand import FakeTask, Server, Status


@pytest.mark.parametrize(
    ("status", "stop_flags", "idx", "is_in_seat", "is_matched"),
    [
        (Status.WAITING, [False, False], None, False, False),
        (Status.WAITING, [False, False], 1, False, False),
        (Status.WAITING, [False, True], None, False, True),
        (Status.PREEMPTED, [False, False], None, False, True),
        (Status.WAITING, [False, False], 1, True, True),
    ],
)
def test_a_new_request_is_matched_and_started_only_when_there_is_a_seat(
    monkeypatch, status, stop_flags, idx, is_in_seat, is_matched
):
    monkeypatch.setattr(seats, "PrefixCacheAdapter", SimpleNamespace)
    request, asked = FakeTask("x", [1]), []
    request.status, request.idx = status, idx
    cache = SimpleNamespace(may_match=lambda each: True, num_gpu_blocks=9)
    manager = SimpleNamespace(stop_flags=stop_flags, tasks_list=[None, is_in_seat and request], cache_manager=cache)
    matched = seats.get_prefix_cached_blocks(lambda each: not asked.append(each), manager, (request,), {})
    assert (matched, asked) == (is_matched, [request] * is_matched)
    assert seats.blocks_to_start(lambda each, blocks: blocks, manager, (request, 4), {}) == (4 if matched else 10)


def manager_of(*names, num_seats, role="mixed"):
    """Of which these wait, preempted, each in its seat."""
    manager = Server(seats=num_seats).manager
    manager.config.scheduler_config.splitwise_role = role
    for idx, name in enumerate(names):
        request = FakeTask(name, [1] * 20)
        request.status, request.output_token_ids, request.idx = Status.PREEMPTED, [7, 8], idx
        manager.waiting.append(request)
        manager.tasks_list[idx], manager.stop_flags[idx], manager.req_dict[name] = request, False, idx
    return manager


def seen(manager):
    waiting = [(each.request_id, each.status, each.idx) for each in manager.waiting]
    return waiting, [*manager.stop_flags], {**manager.req_dict}


def test_when_preempted_requests_wait_in_all_seats_one_of_them_starts_as_a_new_one():
    manager = manager_of("a", "b", num_seats=2)
    seats.let_one_start(manager)
    waiting = [("a", Status.PREEMPTED, 0), ("b", Status.WAITING, None)]
    assert seen(manager) == (waiting, [False, True], {"a": 0})
    assert manager.tasks_list == [manager.waiting[0], None]
    assert manager.waiting[1].need_prefill_tokens == 22, "with the tokens that it has generated"


def test_on_a_prefill_server_it_keeps_the_seat_that_its_request_has_from_the_beginning():
    manager = manager_of("a", num_seats=1, role="prefill")
    seats.let_one_start(manager)
    assert seen(manager) == ([("a", Status.WAITING, 0)], [False], {"a": 0})
    assert manager.tasks_list == [manager.waiting[0]]


@pytest.mark.parametrize(
    ("num_seats", "others"),
    [
        (3, {}),
        (2, {"running": [None]}),
        (2, {"to_be_rescheduled_request_id_set": {"x"}}),
        (2, {"to_be_aborted_req_id_set": {"x"}}),
    ],
    ids=["a free seat", "one runs", "one is not yet preempted", "one is about to leave"],
)
def test_what_comes_to_an_end_by_itself_is_left_alone(num_seats, others):
    manager = manager_of("a", "b", num_seats=num_seats)
    vars(manager).update(others)
    before = seen(manager)
    seats.let_one_start(manager)
    assert seen(manager) == before


def test_one_may_start_before_each_schedule(monkeypatch):
    manager, steps = manager_of("a", num_seats=1), []
    monkeypatch.setattr(seats, "schedule", lambda *given: steps.append(given[1].waiting[0].status) or "scheduled")
    assert seats.schedule_with_a_seat(None, manager, (), {}) == "scheduled"
    assert steps == [Status.WAITING]
