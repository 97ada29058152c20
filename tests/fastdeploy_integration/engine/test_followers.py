"""Requests that wait for what the batch computes for another one, in a queue as FastDeploy's."""

from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1.fastdeploy_integration.engine import patches as engine_patches

from .by_hand import begin
from .fake_scheduler import FakeScheduler, FakeTask, make_adapter


def scheduler_of(num_device_blocks=200, *, worth=1, **options):
    return FakeScheduler(make_adapter(num_device_blocks, shared_prefill_tokens=worth), **options)


def add(scheduler, *names, prompt, **options):
    tasks = [FakeTask(name, prompt, **options) for name in names]
    for task in tasks:
        scheduler.add(task)
    return tasks


def step(scheduler):
    """Prompt tokens of each request in the batch, and who waits then."""
    batch = [task for task in scheduler.step() if isinstance(task, FakeTask)]
    scheduler.cache.check()
    computed = {task.request_id: task.prefill_end_index - task.prefill_start_index for task in batch}
    return computed, [task.request_id for task in scheduler.waiting]


def counted(scheduler):
    counters = scheduler.cache.manager.stats().counters
    return counters.shared_prefill_requests, counters.shared_prefill_tokens


def test_sixteen_equal_prompts_at_once_cost_little_more_than_one():
    scheduler = scheduler_of(600, worth=256, budget=8192, seats=16)
    names = [f"r{index:02}" for index in range(16)]
    tasks = add(scheduler, *names, prompt=range(1, 502))
    assert step(scheduler) == ({"r00": 501}, names[1:])
    assert step(scheduler) == (dict.fromkeys(names[1:], 1), [])
    scheduler.run_dry()
    assert scheduler.num_computed_tokens == 501 + 15
    assert counted(scheduler) == (15, 15 * 500)
    outputs = {tuple(scheduler.finished[task.request_id].output_token_ids) for task in tasks}
    assert len(outputs) == 1, "and the fake worker has checked what they read"


def test_others_pass_a_follower_and_it_is_next():
    scheduler = scheduler_of(budget=64)
    add(scheduler, "leader", "follower", prompt=range(1, 10))
    add(scheduler, "other", prompt=range(50, 59))
    assert step(scheduler) == ({"leader": 9, "other": 9}, ["follower"])
    add(scheduler, "late", prompt=range(70, 79))
    assert step(scheduler) == ({"follower": 1, "late": 9}, [])


@pytest.mark.parametrize(
    ("num_device_blocks", "budget", "seats"),
    [(200, 64, 3), (8, 64, 6), (200, 18, 6)],
    ids=["no seat for both", "no room for both", "no budget for all of it"],
)
def test_who_would_take_what_the_follower_needs_stays_behind_it(num_device_blocks, budget, seats):
    scheduler = scheduler_of(num_device_blocks, budget=budget, seats=seats)
    add(scheduler, "leader", "follower", prompt=range(1, 10), max_tokens=1)
    add(scheduler, "other", prompt=range(50, 59), max_tokens=1)
    add(scheduler, "last", prompt=range(80, 89), max_tokens=1)
    expected = {"leader": 9}, ["follower", "other", "last"]
    if seats == 3:
        expected = {"leader": 9, "other": 9}, ["follower", "last"]
    assert step(scheduler) == expected
    computed, _ = step(scheduler)
    assert computed["follower"] == 1
    assert next(iter(computed)) == "follower"


def test_the_end_of_the_leader_in_the_batch_ends_the_wait():
    """It is thrown out of the very batch, as FastDeploy may do it: then the batch computes nothing for others."""
    cache = make_adapter(200, shared_prefill_tokens=1)
    leader, follower = FakeTask("leader", range(1, 10)), FakeTask("follower", range(1, 10))
    begin(cache, leader)
    assert cache.waits_for_prefill(follower, [])
    cache.release_block_ids(leader)
    assert not cache.waits_for_prefill(follower, [])
    cache.check()
    cache.batch_sent()
    assert cache.num_uncached_tokens(follower) == 9


@pytest.mark.parametrize("end", ["batch_sent", "batch_lost", "reset"])
def test_nobody_waits_for_a_batch_that_is_over(end):
    cache = make_adapter(200, shared_prefill_tokens=1)
    leader, follower = FakeTask("leader", range(1, 10)), FakeTask("follower", range(1, 10))
    begin(cache, leader)
    assert cache.waits_for_prefill(follower, [])
    cache.send_swaps([leader])
    getattr(cache, end)()
    assert not cache.waits_for_prefill(follower, [])
    assert cache.num_uncached_tokens(follower) == (1 if end == "batch_sent" else 9)


def test_a_request_whose_batch_was_lost_leads_nobody():
    """Its tokens have a hole: what it computes from then on is never found."""
    scheduler = scheduler_of(budget=16)
    (leader,) = add(scheduler, "leader", prompt=range(1, 40))
    scheduler.cache.send_swaps([])
    scheduler.tokens_left = 16
    scheduler._schedule_waiting(batch := [])
    scheduler.cache.send_swaps(batch)
    scheduler.cache.batch_lost()
    scheduler.tokens_left = 16
    scheduler._schedule_running([])
    assert scheduler.cache.computes(leader)
    assert not scheduler.cache.waits_for_prefill(FakeTask("follower", range(1, 40)), [])


def test_a_request_with_images_does_not_wait():
    """FastDeploy may rewrite them until its match."""
    scheduler = scheduler_of(budget=64)
    add(scheduler, "leader", prompt=range(1, 10))
    items = {"mm_positions": [SimpleNamespace(offset=8, length=1)], "mm_hashes": ["h"]}
    scheduler.add(FakeTask("follower", range(1, 10), items=items))
    assert step(scheduler) == ({"leader": 9, "follower": 9}, [])


def test_followers_survive_a_schedule_that_raises():
    """FastDeploy has taken them off its queue by then."""
    scheduler = scheduler_of(budget=64)
    add(scheduler, "leader", "one", "two", prompt=range(1, 10))
    add(scheduler, "other", prompt=range(50, 59))
    match, scheduler._match = scheduler._match, None

    def raising(task):
        if task.request_id == "other":
            raise RuntimeError("injected")
        return match(task)

    scheduler._match = raising
    with pytest.raises(RuntimeError, match="injected"):
        scheduler.step()
    assert [task.request_id for task in scheduler.waiting] == ["other"]
    scheduler.followers.put_back(scheduler)
    assert [task.request_id for task in scheduler.waiting] == ["one", "two", "other"]


@pytest.mark.parametrize(("answer", "expected", "num_asked"), [(None, None, 0), (True, True, 0), (False, "passed", 1)])
def test_only_a_complete_request_is_asked_whether_it_waits(answer, expected, num_asked):
    """None is an error, True says that FastDeploy is loading its images."""
    asked = []
    followers = SimpleNamespace(passes_over=lambda manager, request: asked.append((manager, request)) or "passed")
    manager, request = SimpleNamespace(cache_manager=SimpleNamespace(followers=followers)), object()
    assert engine_patches.waiting_async_process(lambda each: answer, manager, (request,), {}) == expected
    assert asked == [(manager, request)] * num_asked
