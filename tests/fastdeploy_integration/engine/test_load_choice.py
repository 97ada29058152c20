"""What is on the host is loaded where that is sooner than computing it, as the workers' times say. The fake worker
checks that every block that is read holds what it should.
"""

from functools import partial

import pytest

from fastdeploy_kvcache_v1.fastdeploy_integration.engine.adapter import PrefixCacheAdapter
from fastdeploy_kvcache_v1.scheduler.load_costs import FEWEST_TOKENS
from fastdeploy_kvcache_v1.timings import LoadTime, PrefillTime, Timings

from .fake_scheduler import FakeScheduler, FakeTask, make_adapter

BLOCK = 4
PROMPT = [*range(1, 42)]
"""Ten blocks and a token."""

OTHERS = [*range(100, 257)]
"""It pushes everything else out of 40 device blocks."""


def scheduler_of(*, device_blocks=40, host_blocks=400, **options):
    cache = make_adapter(device_blocks, host_blocks, write_policy="write_through", shared_prefill_tokens=8)
    return FakeScheduler(cache, **{"budget": 500, "seats": 16, **options})


def measure(scheduler, copy_s, compute_s=1.0, rank=0):
    """Seconds per token."""
    load = LoadTime(100, 100 * BLOCK * copy_s)
    prefill = PrefillTime(FEWEST_TOKENS, 0.0, FEWEST_TOKENS * compute_s)
    scheduler.cache.measured({rank: Timings((load,) * 50, (prefill,) * 50)})


def serve(scheduler, tokens):
    """How many of them were cached."""
    task = FakeTask(f"r{len(scheduler.finished)}", tokens, 1)
    scheduler.add(task)
    scheduler.step()
    started_at = task.prefill_start_index
    scheduler.run_dry()
    scheduler.cache.check()
    return started_at


def put_on_host(scheduler):
    serve(scheduler, PROMPT)
    serve(scheduler, OTHERS)


def counters(scheduler):
    return scheduler.cache.manager.stats().counters


@pytest.mark.parametrize(("copy_s", "cached"), [(0.5, 40), (1.0, 40), (2.0, 12), (10.0, 0)])
def test_as_much_is_loaded_as_arrives_while_the_rest_is_computed(copy_s, cached):
    """At 2 s per token, 12 tokens come in 24 s, while 29 are computed; 16 would come in 32 s, beside 25."""
    scheduler = scheduler_of()
    put_on_host(scheduler)
    measure(scheduler, copy_s)
    assert serve(scheduler, PROMPT) == cached
    assert scheduler.worker.num_swapped_in == cached // BLOCK
    assert counters(scheduler).declined_load_tokens == 40 - cached
    assert serve(scheduler, PROMPT) == 40, "what was computed is on the device"


def test_what_was_declined_keeps_its_host_copy():
    scheduler = scheduler_of()
    put_on_host(scheduler)
    measure(scheduler, 10.0)
    assert serve(scheduler, PROMPT) == 0
    serve(scheduler, OTHERS)
    measure(scheduler, 0.1)
    assert serve(scheduler, PROMPT) == 40
    assert scheduler.worker.num_swapped_out == (len(PROMPT) + len(OTHERS)) // BLOCK, "each block once"


def test_a_request_that_is_unscheduled_again_declines_nothing_until_it_is_scheduled():
    answers = iter([False, False, True, True, False])
    scheduler = scheduler_of(chance=lambda: next(answers, False))
    put_on_host(scheduler)
    measure(scheduler, 10.0)
    scheduler.add(FakeTask("late", PROMPT, 1))
    for _ in range(2):
        scheduler.step()
        assert counters(scheduler).declined_load_tokens == 0
    scheduler.run_dry()
    assert counters(scheduler).declined_load_tokens == 40


def test_equal_prompts_compute_declined_blocks_once():
    scheduler = scheduler_of(device_blocks=60)
    serve(scheduler, PROMPT)
    serve(scheduler, [*range(100, 337)])
    measure(scheduler, 10.0)
    before = scheduler.num_computed_tokens
    for index in range(4):
        scheduler.add(FakeTask(f"same {index}", PROMPT, 1))
    scheduler.run_dry()
    assert scheduler.num_computed_tokens - before == 41 + 3


def test_what_the_batch_computes_for_others_hides_a_copy():
    """All 40 tokens come in 80 s, while 80 are computed for another request."""
    scheduler = scheduler_of(device_blocks=60)
    serve(scheduler, PROMPT)
    serve(scheduler, [*range(100, 337)])
    measure(scheduler, 2.0)
    other, task = FakeTask("other", range(500, 580), 1), FakeTask("late", PROMPT, 1)
    scheduler.add(other)
    scheduler.add(task)
    scheduler.step()
    assert (other.prefill_start_index, task.prefill_start_index) == (0, 40)


def test_what_the_batch_loads_for_others_delays_a_copy():
    scheduler = scheduler_of(device_blocks=60)
    second = [*range(50, 91)]
    serve(scheduler, PROMPT)
    serve(scheduler, second)
    serve(scheduler, [*range(100, 337)])
    measure(scheduler, 2.0)
    tasks = [FakeTask(name, tokens, 1) for name, tokens in (("first", PROMPT), ("second", second))]
    for task in tasks:
        scheduler.add(task)
    scheduler.step()
    # The second one's copies begin after 24 s: 16 tokens arrive after 56 s, while 29 + 25 are computed, 12 after 48 s.
    assert [task.prefill_start_index for task in tasks] == [12, 12]


def test_only_what_the_batch_still_computes_hides_a_copy():
    """A batch computes 8 tokens at most, so a copy of 4 tokens may take 8 s."""
    kind = partial(PrefixCacheAdapter, max_batched_tokens=8)
    cache = make_adapter(60, 400, write_policy="write_through", kind=kind)
    scheduler = FakeScheduler(cache, budget=8)
    serve(scheduler, PROMPT)
    serve(scheduler, [*range(100, 337)])
    measure(scheduler, 2.0)
    task = FakeTask("late", PROMPT, 1)
    scheduler.add(task)
    scheduler.step()
    assert task.prefill_start_index == 4
    scheduler.run_dry()
    assert counters(scheduler).declined_load_tokens == 36, "once, though the rest comes in five batches"
