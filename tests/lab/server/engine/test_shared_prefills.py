"""A cold prefix is computed once, whatever happens to the request that computes it; and nobody waits without end."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.lab.model.step import StepResult
from tests.lab.server.engine.test_scheduler import tokens_of
from tests.lab.server.harness import Harness, expected_outputs

BLOCK = 4


def make(num_device_blocks=200, *, worth=1, num_host_blocks=0, **options):
    """Every block is worth waiting for."""
    config = KVCacheConfig(num_device_blocks, num_host_blocks, BLOCK, shared_prefill_tokens=worth)
    return Harness(config, **options)


def counted(harness):
    counters = harness.manager.stats().counters
    return counters.shared_prefill_requests, counters.shared_prefill_tokens


def test_sixteen_equal_prompts_at_once_cost_little_more_than_one():
    prompt = list(range(500))
    harness = make(800, worth=256, max_num_seqs=16, max_num_batched_tokens=8192)
    recorders = [harness.submit(str(index), prompt, 4) for index in range(16)]
    batches = [tokens_of(harness.step()) for _ in range(2)]
    assert batches[0] == [("0", 500)]
    assert batches[1] == [("0", 1), *((str(index), 4) for index in range(1, 16))], "a last block each, for its logits"
    harness.run()
    assert [recorder.tokens for recorder in recorders] == [expected_outputs(prompt, 4)] * 16
    assert counted(harness) == (15, 15 * 496)
    usages = [recorder.deltas[-1].usage for recorder in recorders]
    assert [usage.cached_tokens for usage in usages if usage] == [0, *[496] * 15]


def test_a_prefix_that_saves_less_than_a_step_costs_is_computed_again():
    harness = make(worth=40, max_num_batched_tokens=256)
    for name in ("first", "second", "third"):
        harness.submit(name, [*range(16), ord(name[0])], 1)
    assert tokens_of(harness.step()) == [("first", 17), ("second", 17), ("third", 17)], "2 * 16 tokens"
    for name in ("1st", "2nd", "3rd", "4th"):
        harness.submit(name, [*range(50, 66), ord(name[0])], 1)
    assert tokens_of(harness.step()) == [("1st", 17)], "3 * 16 tokens"
    assert tokens_of(harness.step()) == [("2nd", 1), ("3rd", 1), ("4th", 1)]


@pytest.mark.parametrize(
    ("blocks", "budget", "requests", "batches"),
    [
        # A follower starts when the shared prefix is committed, not when the leader ends.
        (200, 24, [range(40), [*range(20), 99]], [[(0, 24)], [(0, 16), (1, 1)]]),
        # It needs no room for the blocks it waits for: 5 of the leader, 1 that it does not share, 1 for the other.
        (7, 64, [range(17), range(17), range(50, 53)], [[(0, 17), (2, 3)]]),
        # A prompt that would go on before the follower does not pass it.
        (200, 24, [range(9), range(9), range(50, 90), range(30, 34)], [[(0, 9)], [(1, 1), (2, 23)]]),
    ],
)
def test_who_is_computed_beside_a_leader_and_its_follower(blocks, budget, requests, batches):
    harness = make(blocks, max_num_batched_tokens=budget)
    for number, prompt in enumerate(requests):
        harness.submit(str(number), prompt, 1)
    assert [tokens_of(harness.step()) for _ in batches] == [[(str(n), count) for n, count in each] for each in batches]


def test_what_a_reset_makes_unfindable_is_not_waited_for():
    harness = make(max_num_batched_tokens=24)
    harness.submit("leader", range(40), 2)
    harness.step()
    harness.core.reset_cache()
    harness.submit("follower", [*range(32), 99], 1)
    assert tokens_of(harness.step()) == [("leader", 16), ("follower", 8)]


# ---- the place of one that waits


@pytest.mark.parametrize(("blocks", "seats"), [(200, 3), (12, 8)], ids=["seat", "room"])
def test_follower_keeps_its_seat_and_blocks_while_others_may_pass_it(blocks, seats):
    """12 blocks: 4 for the leader, 2 that the follower does not share with it, 4 for the other."""
    harness = make(blocks, max_num_seqs=seats, max_num_batched_tokens=64)
    for name, first in (("leader", 0), ("follower", 0), ("other", 50), ("late", 70)):
        harness.submit(name, range(first, first + 9), 5)
    assert tokens_of(harness.step()) == [("leader", 9), ("other", 9)]
    assert tokens_of(harness.step()) == [("leader", 1), ("other", 1), ("follower", 1)]
    harness.run()
    assert harness.num_preemptions == 0


# ---- the leader's death


def fail_leader(harness, batch):
    result = harness.worker.run(batch)
    tokens = {name: token for name, token in result.tokens.items() if name != "leader"}
    return StepResult(tokens=tokens, errors={"leader": "injected"}, report=result.report)


def retry_leader(harness, batch):
    """A copy that it needs failed: it is preempted, and computed again."""
    result = harness.worker.run(batch)
    tokens = {name: token for name, token in result.tokens.items() if name != "leader"}
    return StepResult(tokens=tokens, retry={"leader": "torn"}, report=result.report)


def abort_while_computed(harness, batch):
    harness.core.abort("leader")
    return harness.worker.run(batch)


def reset_while_computed(harness, batch):
    harness.core.reset_cache()
    return harness.worker.run(batch)


def preempt_while_computed(harness, batch):
    leader = [each for each in harness.scheduler.running if each.request_id == "leader"]
    for generation in leader:
        harness.scheduler.preempt(generation)
    return harness.worker.run(batch)


DEATHS = [fail_leader, retry_leader, abort_while_computed, reset_while_computed, preempt_while_computed]


@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.parametrize("at", range(6))
def test_the_leaders_death_at_every_step_leaves_nobody_waiting(death, at):
    harness = make(max_num_batched_tokens=16)
    prompt = list(range(41))
    recorders = {name: harness.submit(name, prompt, 3) for name in ("leader", "one", "two", "three")}
    num_steps = 0
    while not harness.core.is_idle:
        harness.core.step()
        batch = harness.sent.pop()
        is_named = any(task.request_id == "leader" for task in batch.requests)
        dies = num_steps == at and is_named
        harness.core.on_step_result(death(harness, batch) if dies else harness.worker.run(batch))
        harness.manager.check()
        num_steps += 1
    harness.run()
    for name in ("one", "two", "three"):
        assert recorders[name].tokens == expected_outputs(prompt, 3), name
    again = 41 if at < 6 else 0  # what was computed is found, or computed once more, by one of them
    tails = 4 * (1 + 2)  # the last token, and the outputs
    assert harness.core.counters.computed_tokens <= 41 + again + tails + 16
    assert num_steps <= 20


# ---- any order of events, against the least that has to be computed


def least_tokens(requests):
    """Every block once, and of each request what no cache can give: what is behind its last block, and its outputs."""
    blocks, tails = set(), 0
    for prompt, length in requests:
        num_blocks = (len(prompt) - 1) // BLOCK
        blocks.update(tuple(prompt[: BLOCK * (index + 1)]) for index in range(num_blocks))
        tails += len(prompt) - num_blocks * BLOCK + length - 1
    return len(blocks) * BLOCK + tails


PROMPTS = st.builds(
    lambda family, shared, own: [family] * shared + own,
    st.integers(0, 1),
    st.integers(1, 40),
    st.lists(st.integers(2, 3), min_size=1, max_size=9),
)
LIVES = st.lists(st.tuples(PROMPTS, st.integers(1, 3), st.integers(0, 2)), min_size=1, max_size=8)
"""Prompt, outputs, and steps until the next one comes."""


@settings(max_examples=150, deadline=None)
@given(LIVES, st.sampled_from([3, 8, 21, 64, 400]), st.integers(1, 5))
def test_nothing_is_computed_twice_in_any_order_of_arrivals(lives, budget, seats):
    harness = make(400, max_num_seqs=seats, max_num_batched_tokens=budget)
    recorders = []
    for index, (prompt, length, pause) in enumerate(lives):
        recorders.append(harness.submit(str(index), prompt, length))
        for _ in range(pause):
            harness.step()
    harness.run()
    requests = [(prompt, length) for prompt, length, _ in lives]
    assert [recorder.tokens for recorder in recorders] == [expected_outputs(*request) for request in requests]
    assert harness.core.counters.computed_tokens <= least_tokens(requests)
