"""What happens when a batch never reaches the workers: blocks, requests and copies that it named."""

from contextlib import suppress
from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1.fastdeploy_integration.engine import patches as engine_patches
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.same_id import HeldBack

from .by_hand import begin, end, found
from .fake_scheduler import Control, FakeScheduler, FakeTask, Kind, Status, make_adapter, serve
from .fake_weight_update import FakeResourceManager


def lose_next_batch(scheduler):
    received = scheduler.worker.receive
    scheduler.worker.receive = lambda batch: ([], [])
    scheduler.step()
    scheduler.worker.receive = received


def test_a_batch_that_the_host_drops_itself():
    cache = make_adapter(8, 40, write_policy="write_through")
    scheduler = FakeScheduler(cache, budget=4)
    scheduler.add(FakeTask("a", [1] * 24))
    for _ in range(3):
        scheduler.step()
    lose_next_batch(scheduler)
    scheduler.worker.rows.clear()
    cache.held_back = HeldBack()
    engine = SimpleNamespace(resource_manager=SimpleNamespace(cache_manager=cache))
    assert engine_patches.clear_data(lambda: True, engine, (), {}) is True
    cache.check()
    scheduler.running[0].status = Status.FINISHED
    scheduler._end(scheduler.running[0])
    assert serve(scheduler, [1] * 24, [1] * 24) == [0, 20]
    cache.manager.check_idle()


def test_requests_that_run_keep_their_blocks_when_the_cache_is_forgotten():
    """After a weight update the host asks for an empty cache, though requests may be running again."""
    cache = make_adapter(24, 24, write_policy="write_through")
    scheduler = FakeScheduler(cache)
    serve(scheduler, [1] * 20)
    scheduler.add(FakeTask("running", [1] * 30, 12))
    scheduler.step()
    cache.batch_dropped()
    scheduler.add(FakeTask("new", [2] * 40, 12))
    scheduler.run_dry()
    cache.check()
    cache.manager.check_idle()
    assert scheduler.finished.keys() >= {"running", "new"}


# ---- batches that the host loses between `schedule` and the queue


class Loop:
    """The host's schedule loop, its worker and the thread that reads tokens, one after the other."""

    def __init__(self, cache, **settings):
        self.manager = FakeResourceManager(cache, **settings)

    def step(self, *, put=None):
        """Returns the batch, also of a step in which `put` raises."""
        tasks, errors = self.manager.schedule()
        assert not errors
        if tasks:
            self.send(tasks, put or self.deliver)
        self.manager.take_tokens(self.manager.worker.step())
        self.manager.cache.check()
        return tasks

    def send(self, tasks, put):
        with suppress(ConnectionError):  # as the host: it logs that, and goes on
            engine_patches.put_tasks(put, None, ((tasks, len(tasks)),), {})

    def deliver(self, message):
        tasks, _ = message
        self.manager.confirm(*self.manager.worker.receive(tasks))

    def run_dry(self):
        for _ in range(500):
            if not self.manager.requests:
                return
            self.step()
        raise AssertionError(f"no progress: {sorted(self.manager.requests)}")


def broken(message):
    raise ConnectionError("the queue")


def kinds(batch):
    return [(task.task_type, task.request_id) for task in batch]


def test_blocks_of_a_batch_that_was_not_sent_are_never_found():
    cache = make_adapter(24)
    loop = Loop(cache)
    loop.manager.add(FakeTask("a", [1] * 17))
    loop.step(put=broken)
    assert found(cache, [1] * 17) == 0
    assert kinds(loop.step()) == [(Kind.PREEMPTED, "a")]
    assert found(cache, [1] * 17) == 0
    loop.step()
    assert found(cache, [1] * 17) == 16
    loop.run_dry()
    cache.manager.check_idle()


def test_blocks_are_found_only_after_their_batch_was_sent():
    cache = make_adapter(24)
    manager = FakeResourceManager(cache)
    manager.add(FakeTask("a", [1] * 17))
    tasks, _ = manager.schedule()
    assert found(cache, [1] * 17) == 0
    engine_patches.put_tasks(lambda message: None, None, ((tasks, 1),), {})
    assert found(cache, [1] * 17) == 16
    cache.check()


def test_a_request_with_a_lost_chunk_starts_again_and_finishes():
    cache = make_adapter(24)
    loop = Loop(cache, budget=8)
    task = FakeTask("a", [1] * 20, 5)
    loop.manager.add(task)
    loop.step()
    loop.step(put=broken)
    assert kinds(loop.step()) == [(Kind.PREEMPTED, "a")]
    assert task.status is Status.PREEMPTED
    loop.step()
    assert (task.prefill_start_index, task.prefill_end_index) == (8, 16)  # the first chunk was computed
    loop.run_dry()
    assert len(loop.manager.finished["a"].output_token_ids) == 5
    cache.manager.check_idle()


def test_a_schedule_that_raises_loses_what_it_had_scheduled():
    cache = make_adapter(24)
    loop = Loop(cache)
    manager = loop.manager
    manager.add(FakeTask("a", [1] * 12))
    manager.add(FakeTask("bad", [2] * 4))
    match = manager._match

    def raising(task):
        if task.request_id == "bad":
            raise AssertionError("as the host's asserts")
        return match(task)

    manager._match = raising
    with pytest.raises(AssertionError, match="as the host's"):
        loop.step()
    cache.check()
    manager._match = match
    batch = loop.step()
    assert [task.request_id for task in batch] == ["a", "bad"], "without a seat it waits, in front"
    assert batch[0].prefill_start_index == 0
    loop.run_dry()
    cache.manager.check_idle()


@pytest.mark.parametrize("are_back", [False, True])
def test_requests_that_a_schedule_had_passed_over_when_it_raised_wait_once(are_back):
    manager = FakeResourceManager(make_adapter(24))
    tasks = [FakeTask(name, [1] * 4) for name in "abc"]
    manager.waiting.extend(tasks)

    def schedule():
        scheduled_reqs, skip_requests = [], [manager.waiting.popleft(), manager.waiting.popleft()]
        if are_back:
            manager.waiting.extend(skip_requests)
        raise AssertionError(f"as the host's: {scheduled_reqs}")

    with pytest.raises(AssertionError, match="as the host's"):
        engine_patches.schedule(schedule, manager, (), {})
    assert [task.request_id for task in manager.waiting] == (["c", "a", "b"] if are_back else ["a", "b", "c"])


def test_lost_news_of_preempted_aborted_and_decoding_requests_are_told_again():
    cache = make_adapter(12)
    loop = Loop(cache)
    manager = loop.manager
    for name in "abc":
        manager.add(FakeTask(name, [ord(name)] * 10, 12))
    loop.step()
    manager.aborting.add("a")
    lost = []
    for _ in range(20):
        lost = loop.step(put=lambda message: broken(message) if len(message[0]) > 2 else loop.deliver(message))
        if len(lost) > 2:
            break
    assert {kind for kind, _ in kinds(lost)} >= {Kind.ABORT, Kind.DECODE}
    again = kinds(loop.step())
    expected = [(Kind.PREEMPTED if kind is Kind.PREFILL else kind, name) for kind, name in kinds(lost)]
    assert again[: len(lost)] == expected
    loop.run_dry()
    assert manager.num_aborted == 1
    cache.manager.check_idle()


def test_a_lost_task_of_a_request_that_ended_is_not_told_again():
    manager = FakeResourceManager(make_adapter(12))
    ended = FakeTask("a", [1] * 4)
    ended.block_tables = [3]
    lost = [Control(kind, ended) for kind in (Kind.PREEMPTED, Kind.ABORT, Kind.DECODE)]
    transit = manager.cache.transit
    transit.depart(manager, lost)
    transit.recover(manager)
    assert transit.depart(manager, []) == []


@pytest.mark.parametrize(("has_them", "is_told"), [(True, True), (False, False), (None, False)])
def test_a_lost_extension_is_told_again_as_long_as_its_request_has_those_blocks(has_them, is_told):
    manager, request = FakeResourceManager(make_adapter(12)), FakeTask("a", [1] * 4)
    request.extend_block_tables = [5]
    task = SimpleNamespace(task_type=SimpleNamespace(name="EXTEND"), request_id="a", extend_block_tables=[5])
    if has_them:
        task.extend_block_tables = request.extend_block_tables
    if has_them is not None:
        manager.requests["a"] = request
    transit = manager.cache.transit
    transit.depart(manager, [task])
    transit.recover(manager)
    assert transit.depart(manager, []) == [task] * is_told


def test_a_lost_batch_takes_no_running_request_by_its_id():
    """FastDeploy 2.5 keeps the id of a request that ended while its abortion was on its way."""
    loop = Loop(make_adapter(24))
    first, second = FakeTask("a", [1] * 8, 9), FakeTask("b", [2] * 8)
    loop.manager.add(first)
    loop.step()
    loop.manager.to_be_aborted_req_id_set.add("a")
    loop.manager.add(second)
    loop.step(put=broken)
    loop.manager.cache.transit.recover(loop.manager)
    assert loop.manager.running == [first]


def test_a_lost_batch_takes_an_aborted_request_that_schedule_had_not_taken_out_yet():
    manager = FakeResourceManager(make_adapter(24))
    aborted = FakeTask("a", [1] * 8)
    manager.running, aborted.status = [aborted], Status.PREEMPTED
    manager.to_be_aborted_req_id_set.add("a")
    manager.cache.transit.depart(manager, [task := Control(Kind.ABORT, aborted)])
    manager.cache.transit.recover(manager)
    assert manager.running == []
    manager.requests["a"] = aborted
    assert manager.cache.transit.depart(manager, []) == [task]


def test_a_lost_batch_with_copies_does_not_stop_the_worker():
    cache = make_adapter(8, 40, write_policy="write_back")
    loop = Loop(cache)
    for name, token in (("a", 1), ("b", 2)):
        loop.manager.add(FakeTask(name, [token] * 24))
        loop.run_dry()
    loop.manager.add(FakeTask("c", [1] * 24))
    (lost,) = loop.step(put=broken)
    assert lost.prefill_start_index == 20, "its prefix was to be swapped in"
    loop.run_dry()
    assert loop.manager.finished["c"].prefill_start_index == 0, "no cached block can be trusted"
    loop.manager.add(FakeTask("d", [1] * 24))
    loop.run_dry()
    assert loop.manager.finished["d"].prefill_start_index == 20
    cache.manager.check_idle()


def test_a_request_with_a_hole_caches_nothing_more():
    """Where the host goes on with it all the same."""
    cache = make_adapter(12)
    begin(cache, task := FakeTask("a", [1] * 17), 8)
    cache.batch_lost()
    cache.check()
    cache.update_cache_blocks(task, 4, 17)
    cache.batch_sent()
    task.status = Status.FINISHED
    cache.cache_output_blocks(task, 4)
    cache.check()
    end(cache, task)
    assert len(cache.gpu_free_block_list) == 12
    assert cache.num_recycled_wrongly == 0


def test_a_request_is_not_complete_while_its_prompt_is_on_its_way():
    cache = make_adapter(12)
    begin(cache, task := FakeTask("a", [1] * 9))
    cache.cache_output_blocks(task, 4)
    assert cache.manager.stats().device_cached_blocks == 0
    cache.check()


# ---- at a decode server, whose requests cannot be computed again


def test_a_request_that_a_lost_batch_begins_leaves_a_decode_server_and_its_client_is_told():
    """FastDeploy answers when it sends the task. Computed here it would be without a client."""
    loop = Loop(make_adapter(24))
    manager, first, other = loop.manager, FakeTask("a", [1] * 8), FakeTask("b", [2] * 8, 50)
    manager.cache.preempted_leave, manager.req_dict = True, {"a": 0, "b": 1}
    manager.add(other)
    loop.step()
    manager.add(first)
    loop.step(put=broken)
    seat = first.idx
    assert (Kind.PREEMPTED, "a") in kinds(loop.step())
    assert (manager.running, list(manager.requests), manager.req_dict) == ([other], ["b"], {"b": 1})
    assert (manager.tasks_list[seat], manager.stop_flags[seat], first.block_tables) == (None, True, [])
    assert not manager.to_be_rescheduled_request_id_set
    assert not manager.waiting


def test_the_worker_of_a_decode_server_is_told_again_of_a_preemption_that_was_lost():
    """FastDeploy has forgotten the request, whose row writes to blocks that others have now."""
    manager = FakeResourceManager(make_adapter(24))
    manager.cache.preempted_leave = True
    manager.cache.transit.depart(manager, [task := Control(Kind.PREEMPTED, FakeTask("a", [1] * 8))])
    manager.cache.transit.recover(manager)
    assert manager.cache.transit.depart(manager, []) == [task]


# ---- two requests of one id


def test_a_request_waits_while_another_one_has_its_id(caplog):
    cache = make_adapter(24)
    loop = Loop(cache)
    elder, newcomer, third = (FakeTask("x", [token] * 9, 6) for token in (1, 2, 3))
    for task in (elder, newcomer, third):
        loop.manager.add(task)
        loop.step()
    assert list(loop.manager.running) == [elder]
    assert "request x waits: a live request has the same id" in caplog.text
    assert len(cache.held_back) == 2
    for task in (elder, newcomer, third):
        assert loop.manager.requests["x"] is task
        while loop.manager.requests.get("x") is task:
            loop.step()
        loop.step()
    loop.run_dry()
    assert [len(task.output_token_ids) for task in (elder, newcomer, third)] == [6, 6, 6]
    cache.manager.check_idle()


def test_an_id_that_the_host_forgot_to_forget_is_free():
    manager = FakeResourceManager(make_adapter(24))
    manager.requests["x"] = FakeTask("x", [1])  # ended with an error, before it was scheduled
    task = FakeTask("x", [2])
    manager.add(task)
    assert list(manager.waiting) == [task]


def test_an_id_that_comes_again_is_of_no_abortion_on_its_way():
    """2.5 keeps it there when its request ends first. While that one lives it stays: its abortion is not confirmed."""
    manager = FakeResourceManager(make_adapter(24))
    manager.to_be_aborted_req_id_set.update("xy")
    manager.requests["x"] = FakeTask("x", [1])
    for name in "xy":
        manager.add(FakeTask(name, [2]))
    assert manager.to_be_aborted_req_id_set == {"x"}
    assert [task.request_id for task in manager.waiting] == ["y"]


def test_clearing_all_data_ends_those_that_wait_for_an_id():
    manager = FakeResourceManager(make_adapter(24))
    for _ in range(2):
        manager.add(FakeTask("x", [1]))
    engine = SimpleNamespace(resource_manager=SimpleNamespace(cache_manager=manager.cache))
    engine_patches.clear_data(lambda: True, engine, (), {})
    assert len(manager.cache.held_back) == 0
