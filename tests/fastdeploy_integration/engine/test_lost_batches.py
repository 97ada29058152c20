"""What happens when a batch never reaches the workers: blocks, requests and copies that it named."""

from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1.fastdeploy_integration.engine import patches as engine_patches

from .by_hand import Control, FakeTask, Kind, Server, Status, found


def kinds(batch):
    return [(task.task_type, task.request_id) for task in batch]


@pytest.mark.parametrize("release", [25, 26])
def test_a_batch_is_not_told_again_when_the_queue_raises_but_has_it(release):
    """A preemption told twice is confirmed twice: a request could start again before its last pass has ended."""
    server = Server(24, release=release, budget=8)
    task = server.add("a", [1] * 20, 5)
    server.step()
    server.step("lost after put")
    assert (found(server.cache, [1] * 20), task.status.name.partition("_")[0]) == (16, "RUNNING")
    assert kinds(server.step()) == [(Kind.PREFILL, "a")]


def test_a_lost_request_that_had_no_seat_yet_waits_in_front():
    server = Server(24)
    task = server.add("a", [1] * 12)
    server.schedule("lost before put")
    server.manager.tasks_list[task.idx], server.manager.stop_flags[task.idx], task.idx = None, True, None
    server.add("late", [2] * 4)
    server.cache.transit.recover(server.manager)
    assert (server.manager.waiting[0].request_id, task.status) == ("a", Status.WAITING)
    assert server.is_idle


@pytest.mark.parametrize("are_back", [False, True])
def test_requests_that_a_schedule_had_passed_over_when_it_raised_wait_once(are_back):
    manager = Server(24).manager
    manager.waiting.extend(FakeTask(name, [1] * 4) for name in "abc")

    def schedule():
        scheduled_reqs, skip_requests = [], [manager.waiting.popleft(), manager.waiting.popleft()]
        if are_back:
            manager.waiting.extend(skip_requests)
        raise AssertionError(f"as the host's: {scheduled_reqs}")

    with pytest.raises(AssertionError, match="as the host's"):
        engine_patches.schedule(schedule, manager, (), {})
    assert [task.request_id for task in manager.waiting] == (["c", "a", "b"] if are_back else ["a", "b", "c"])


HAS_IT, HAS_OTHER, IS_GONE = range(3)


@pytest.mark.parametrize(
    ("kind", "request_is", "is_told"),
    [
        ("PREEMPTED", IS_GONE, False),
        ("ABORT", IS_GONE, False),
        ("DECODE", IS_GONE, False),
        ("DECODE", HAS_OTHER, False),
        ("DECODE", HAS_IT, True),
        ("EXTEND", IS_GONE, False),
        ("EXTEND", HAS_OTHER, False),
        ("EXTEND", HAS_IT, True),
    ],
)
def test_a_lost_task_is_told_again_as_long_as_its_request_has_those_blocks(kind, request_is, is_told):
    manager, request = Server(12).manager, FakeTask("a", [1] * 4)
    tables = ([5], [5]) if request_is == HAS_OTHER else ([5],) * 2
    request.block_tables = request.extend_block_tables = tables[0]
    task = SimpleNamespace(
        task_type=SimpleNamespace(name=kind), request_id="a", block_tables=tables[1], extend_block_tables=tables[1]
    )
    if request_is != IS_GONE:
        manager.requests["a"] = request
    transit = manager.cache_manager.transit
    transit.depart(manager, [task])
    transit.recover(manager)
    assert transit.depart(manager, []) == [task] * is_told


def test_a_lost_batch_takes_an_aborted_request_that_schedule_had_not_taken_out_yet():
    manager, aborted = Server(24).manager, FakeTask("a", [1] * 8)
    manager.running, aborted.status = [aborted], Status.PREEMPTED
    manager.to_be_aborted_req_id_set.add("a")
    transit = manager.cache_manager.transit
    transit.depart(manager, [task := Control(Kind.ABORT, aborted)])
    transit.recover(manager)
    assert manager.running == []
    manager.requests["a"] = aborted
    assert transit.depart(manager, []) == [task]


# ---- what FastDeploy drops itself


def test_what_fastdeploy_clears_is_never_found():
    server = Server(8, 40, budget=4, write_policy="write_through")
    server.add("a", [1] * 24)
    for _ in range(3):
        server.step()
    for number in range(2):
        server.add("x", [number])
    server.schedule()
    server.host.queue.batch = None
    server.host.worker.drop_rows()
    engine = SimpleNamespace(resource_manager=server.manager)
    assert engine_patches.clear_data(lambda: True, engine, (), {}) is True
    assert len(server.cache.held_back) == 0, "the second of one id had waited"
    server.cache.check()
    server.manager.finish_requests("a")
    server.manager.waiting.clear()
    server.clients.requests.clear()
    assert server.serve([1] * 24, [1] * 24) == [0, 20]


# ---- at a decode server, whose requests cannot be computed again


def test_a_request_that_a_lost_batch_begins_leaves_a_decode_server_and_its_client_is_told():
    """FastDeploy answers when it sends the task. Computed here it would be without a client."""
    server = Server(24)
    manager, server.cache.preempted_leave = server.manager, True
    other = server.add("b", [2] * 8, 50)
    server.step()
    first = server.add("a", [1] * 8)
    server.schedule("lost in put")
    seat = first.idx
    assert (Kind.PREEMPTED, "a") in kinds(server.schedule())
    assert (manager.running, list(manager.requests), manager.req_dict) == ([other], ["b"], {"b": other.idx})
    assert (manager.tasks_list[seat], manager.stop_flags[seat], first.block_tables) == (None, True, [])
    assert (manager.to_be_rescheduled_request_id_set, list(manager.waiting)) == (set(), [])


# ---- two requests of one id


def test_a_request_waits_while_another_one_has_its_id(caplog):
    server = Server(24)
    tasks = []
    for token in (1, 2, 3):
        tasks.append(server.add("x", [token] * 9, 6))
        server.step()
    assert "request x waits: a live request has the same id" in caplog.text
    assert len(server.cache.held_back) == 2
    for task in tasks:
        assert server.manager.requests["x"] is task
        while server.manager.requests.get("x") is task:
            server.step()
        server.step()
    assert server.is_idle
    assert server.clients.num_ended == {"finished": 3}


def test_an_id_is_free_that_the_host_forgot_to_forget_and_of_no_abortion_on_its_way():
    """2.5 keeps an abortion there when its request ends first. While that one lives it stays: it is not confirmed."""
    manager = (server := Server(24)).manager
    manager.to_be_aborted_req_id_set.update("xy")
    for name in "xz":
        manager.requests[name] = FakeTask(name, [1])  # z ended with an error, before it was scheduled
    for name in "xyz":
        server.add(name, [2])
    assert manager.to_be_aborted_req_id_set == {"x"}
    assert [task.request_id for task in manager.waiting] == ["y", "z"]
