"""Requests that wait for what the batch computes for another one, in FastDeploy's queue."""

from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1.fastdeploy_integration.engine import patches as engine_patches
from tests.world.resource_manager import images_of

from .by_hand import FakeTask, Server, begin, make_adapter, served

NINE = range(1, 10)


def server_of(device=200, *, worth=1, **options):
    return Server(device, shared_prefill_tokens=worth, **{"budget": 64, **options})


def step(server):
    """Prompt tokens of each request in the batch, and who waits then."""
    batch = [task for task in server.schedule() if hasattr(task, "prefill_start_index")]
    waiting = [task.request_id for task in server.manager.waiting]
    server.compute()
    return {task.request_id: task.prefill_end_index - task.prefill_start_index for task in batch}, waiting


def test_sixteen_equal_prompts_at_once_cost_little_more_than_one():
    server = server_of(600, worth=256, budget=8192, seats=16)
    server.serve(range(1, 102))
    names = [f"r{index:02}" for index in range(16)]
    for name in names:
        server.add(name, range(1, 502))
    assert step(server) == ({"r00": 401}, names[1:])
    assert step(server) == (dict.fromkeys(names[1:], 1), [])
    assert server.is_idle
    counters = server.counters
    assert (counters.shared_prefill_requests, counters.shared_prefill_tokens) == (15, 15 * 400)


def test_others_pass_a_follower_and_it_is_next():
    server = server_of(budget=19)  # both prompts, and a token for one row that decodes
    for name in ("leader", "follower"):
        server.add(name, NINE)
    server.add("other", range(50, 59))
    assert step(server) == ({"leader": 9, "other": 9}, ["follower"])
    server.add("late", range(70, 79))
    assert step(server) == ({"follower": 1, "late": 9}, [])


@pytest.mark.parametrize(
    ("device", "budget", "seats", "speculative"),
    [(200, 64, 3, 0), (8, 64, 6, 0), (200, 18, 6, 0), (200, 21, 6, 3)],
    ids=["no seat for both", "no room for both", "no budget for all of it", "what decodes may need it"],
)
def test_who_would_take_what_the_follower_needs_stays_behind_it(device, budget, seats, speculative):
    server = server_of(device, budget=budget, seats=seats)
    server.manager.config.speculative_config.num_speculative_tokens = speculative
    for name, prompt in (("leader", NINE), ("follower", NINE), ("other", range(50, 59)), ("last", range(80, 89))):
        server.add(name, prompt, 1)
    expected = {"leader": 9}, ["follower", "other", "last"]
    if seats == 3:
        expected = {"leader": 9, "other": 9}, ["follower", "last"]
    assert step(server) == expected
    computed, _ = step(server)
    assert (next(iter(computed)), computed["follower"]) == ("follower", 1)


@pytest.mark.parametrize(
    ("end", "uncached"), [("batch_sent", 1), ("batch_lost", 9), ("reset", 9), ("the leader is thrown out", 9)]
)
def test_nobody_waits_for_a_batch_that_is_over(end, uncached):
    cache = make_adapter(200, shared_prefill_tokens=1)
    leader, follower = FakeTask("leader", NINE), FakeTask("follower", NINE)
    begin(cache, leader)
    assert cache.waits_for_prefill(follower, [])
    if hasattr(cache, end):
        cache.send_swaps([leader])
        getattr(cache, end)()
    else:
        cache.release_block_ids(leader)
    assert not cache.waits_for_prefill(follower, [])
    cache.check()
    if not hasattr(cache, end):
        cache.batch_sent()
    assert cache.num_uncached_tokens(follower) == uncached


def test_a_request_whose_batch_was_lost_leads_nobody():
    """Its tokens have a hole: what it computes from then on is never found."""
    cache = make_adapter(200, shared_prefill_tokens=1)
    begin(cache, leader := FakeTask("leader", range(1, 40)), 16)
    cache.batch_lost()
    cache.update_cache_blocks(leader, 4, 32)
    assert cache.computes(leader)
    assert not cache.waits_for_prefill(FakeTask("follower", range(1, 40)), [])


@pytest.mark.parametrize(("image", "waits"), [((0, 4, "h"), True), ((0, 4, "i"), False)], ids=["its", "another"])
def test_a_request_with_images_waits_for_a_prefix_with_these_images(image, waits):
    server = server_of()
    server.add("leader", NINE, image=(0, 4, "h"))
    server.add("follower", NINE, image=image)
    assert step(server) == (({"leader": 9}, ["follower"]) if waits else ({"leader": 9, "follower": 9}, []))


def test_who_has_to_compute_its_image_again_stays_behind_a_follower():
    """Eight tokens of its sixteen are cached, and end in the middle of the image: it begins at the image."""
    server = server_of(budget=20)
    server.add("before", [1] * 8 + [2] * 8, 1, image=(2, 10, "h"))
    step(server)
    for name, prompt, image in (("leader", NINE, None), ("follower", NINE, None), ("other", [1] * 16, (2, 10, "h"))):
        server.add(name, prompt, image=image)
    assert step(server) == ({"leader": 9}, ["follower", "other"])
    assert step(server) == ({"follower": 1, "other": 16}, [])


@pytest.mark.parametrize(
    ("prompt", "image", "uncached"),
    [(range(1, 13), None, 4), (range(1, 14), None, 1), (range(1, 11), None, 2), ([*range(1, 9), 7, 7], (5, 5, "h"), 6)],
    ids=["all is cached", "all but one", "a part", "a part of an image"],
)
def test_what_a_match_leaves_to_compute_is_known_before_it(prompt, image, uncached):
    cache = make_adapter(200)
    for name in ("before", "asked"):
        items = images_of(SimpleNamespace(image=image))
        tokens = prompt if name == "asked" else range(1, 18)
        task = FakeTask(name, tokens, items=items)
        num_uncached = cache.num_uncached_tokens(task)
        assert num_uncached == task.num_total_tokens - served(cache, task)
    assert num_uncached == uncached


def test_followers_survive_a_schedule_that_raises():
    """FastDeploy has taken them off its queue by then."""
    server = server_of()
    for name in ("leader", "one", "two"):
        server.add(name, NINE)
    server.add("other", range(50, 59))
    server.raises_at = 1
    server.schedule("lost in schedule")
    assert [task.request_id for task in server.manager.waiting] == ["one", "two", "other"]
    assert server.is_idle


@pytest.mark.parametrize(("answer", "expected", "num_asked"), [(None, None, 0), (True, True, 0), (False, "passed", 1)])
def test_only_a_complete_request_is_asked_whether_it_waits(monkeypatch, answer, expected, num_asked):
    """None is an error, True says that FastDeploy is loading its images."""
    asked = []
    followers = SimpleNamespace(passes_over=lambda manager, request: asked.append((manager, request)) or "passed")
    manager, request = SimpleNamespace(cache_manager=SimpleNamespace(followers=followers)), object()
    monkeypatch.setattr(engine_patches, "EnginePrefixCache", SimpleNamespace)
    assert engine_patches.waiting_async_process(lambda each: answer, manager, (request,), {}) == expected
    assert asked == [(manager, request)] * num_asked
