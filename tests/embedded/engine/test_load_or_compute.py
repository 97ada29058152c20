"""A swap-in never loses to computing, on a virtual clock: a step takes as long as its copies or its compute."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fastdeploy_kvcache_v1.config import KVCacheConfig, WritePolicy
from fastdeploy_kvcache_v1.metadata import CacheLevel
from fastdeploy_kvcache_v1.timings import LoadTime, PrefillTime
from tests.embedded.shadow import Harness, expected_outputs

BLOCK = 8
STEP_S = 0.5
"""A step costs this much whatever is in it."""

SWAP_OUT_S = 1000.0
"""Per token; nobody waits for it."""


class TimedHarness(Harness):
    """Steps take virtual seconds: one per computed token, `copy_s` per token that is loaded meanwhile.

    `speeds` has a pair for each rank: what its copies take, and its computing, of what is said above. A step ends with
    its slowest rank.
    """

    def __init__(self, copy_s, speeds=((1.0, 1.0),), **options):
        config = KVCacheConfig(70, 400, BLOCK, write_policy=WritePolicy.WRITE_THROUGH)
        clock = {"clock": lambda: self.now, "num_ranks": len(speeds)}
        super().__init__(config, max_num_batched_tokens=256, **clock, **options)
        self.copy_s, self.token_s, self.now, self.num_prompts, self.speeds = copy_s, 1.0, 0.0, 0, speeds

    def step(self):
        self.core.step()
        if not self.sent:
            return None
        batch = self.sent.pop()
        result = self.worker.run(batch)
        compute_s = sum(len(task.token_ids) for task in batch.requests) * self.token_s
        answers = [self.answer(result, compute_s * compute, copy) for copy, compute in self.speeds]
        self.now += STEP_S + max(seconds for seconds, _ in answers)
        for rank, (_, answer) in enumerate(answers):
            self.core.on_step_result(answer, rank)
        self.manager.check()
        return batch

    def answer(self, result, compute_s, copy_share):
        """How long a rank takes for a step, the wait for its own copies included, and what it says."""
        transfers, copying = [], 0.0
        for transfer in result.report.transfers:
            is_swap_in = transfer.target is CacheLevel.DEVICE
            seconds = transfer.num_blocks * BLOCK * (self.copy_s * copy_share if is_swap_in else SWAP_OUT_S)
            copying += seconds if is_swap_in else 0.0
            transfers.append(replace(transfer, seconds=seconds))
        waited = max(0.0, copying - compute_s)
        report = replace(result.report, transfers=tuple(transfers), exposed_wait_s=waited)
        return compute_s + waited, replace(result, report=report)

    def serve(self, prompt):
        """Seconds to the first token."""
        self.num_prompts += 1
        began, recorder = self.now, self.submit(str(self.num_prompts), prompt, 1)
        self.run()
        assert recorder.tokens == expected_outputs(prompt, 1)
        return self.now - began

    def cache_on_host(self, *prompts):
        for prompt in prompts:
            self.serve(prompt)
        self.push_out()
        for _ in range(100):  # rates that are known exactly
            self.scheduler.load_costs.loaded(LoadTime(10, 10 * BLOCK * self.copy_s))
            self.scheduler.load_costs.computed(PrefillTime(100, 0.0, 100.0))

    def push_out(self):
        """Whatever is on the device leaves it; all of it is on the host by then."""
        self.num_prompts += 1
        self.serve([1000 + self.num_prompts] * 555)

    @property
    def num_declined(self):
        return self.manager.stats().counters.declined_load_tokens


def test_a_step_that_loads_says_nothing_of_computing_where_ranks_wait_for_each_other():
    """Rank 0 computes for 64 s while rank 1 waits for its copies: subtracting that wait would leave 64 s less."""
    harness = TimedHarness(1.0, speeds=((0.01, 1.0), (1.0, 0.1)))
    harness.serve(range(200))
    harness.push_out()
    before = harness.scheduler.load_costs.seconds_saved(10, 0, 200, CacheLevel.DEVICE)
    for _ in range(3):
        harness.serve([*range(200), *range(900, 964)])
        harness.push_out()
    assert harness.manager.stats().counters.host_hit_tokens >= 600
    assert harness.scheduler.load_costs.seconds_saved(10, 0, 200, CacheLevel.DEVICE) == pytest.approx(before, rel=0.1)


def test_a_step_that_loads_says_what_computing_costs_where_one_rank_waits_for_its_own_copies():
    harness = TimedHarness(1.0)
    harness.serve(range(200))
    harness.push_out()
    harness.token_s = 3.0
    before = harness.scheduler.load_costs.seconds_saved(10, 0, 200, CacheLevel.DEVICE)
    harness.serve([*range(200), *range(900, 964)])
    assert harness.manager.stats().counters.host_hit_tokens == 200
    assert harness.scheduler.load_costs.seconds_saved(10, 0, 200, CacheLevel.DEVICE) > 1.2 * before


def test_what_waits_for_room_declines_nothing():
    harness = TimedHarness(100.0, max_num_seqs=1)
    for _ in range(2):
        harness.serve(range(100))
        harness.push_out()
    harness.serve(range(500, 601))
    harness.push_out()
    before = harness.num_declined
    harness.submit("long", range(2000, 2300), 9)
    harness.step()
    harness.submit("waiting", range(500, 601), 1)
    for _ in range(5):
        harness.step()
    assert harness.num_declined == before
    harness.run()
    assert harness.num_declined > before


def test_what_the_batch_computes_for_others_hides_a_copy():
    """65 s for the second prompt alone, of which a copy of 128 s hides half."""
    harness = TimedHarness(2.0)
    known = [*range(500, 564)]
    harness.cache_on_host(known)
    harness.submit("first", range(3000, 3100), 1)
    harness.submit("second", [*known, 0], 1)
    assert [len(step.swap_in) for step in harness.step().swap_steps] == [64 // BLOCK]


def test_what_the_batch_loads_for_others_delays_a_copy():
    """Each loads 64 tokens in 122 s, while it computes 64, or computes all in 128 s. Together it is 243 s or 192 s."""
    harness = TimedHarness(1.9)
    prompts = [[*range(first, first + 128)] for first in (500, 700)]
    harness.cache_on_host(*(prompt[:65] for prompt in prompts))
    for name, prompt in zip("ab", prompts, strict=True):
        harness.submit(name, prompt, 1)
    (step,) = harness.step().swap_steps
    assert 64 // BLOCK < len(step.swap_in) < 128 // BLOCK
    harness.run()


def test_steps_that_only_decode_say_nothing_of_prompts():
    """70 one-token prompts are as good as decoding: they take an hour each here."""
    harness = TimedHarness(2.0, max_num_seqs=70)
    harness.cache_on_host(range(200))
    harness.token_s = 3600.0
    for index in range(70):
        harness.submit(f"short {index}", [index], 1)
    harness.run()
    assert harness.scheduler.load_costs.blocks_to_load(200 // BLOCK, 0, 201, budget=256) < 200 // BLOCK


def test_what_is_on_the_device_hides_no_copy():
    """81 tokens are left: one block comes in 48 s, while 73 of them are computed."""
    harness = TimedHarness(6.0)
    prompt = [*range(500, 981)]
    harness.serve(prompt)
    harness.push_out()
    harness.serve(prompt[:401])
    host_hits = harness.manager.stats().counters.host_hit_tokens
    harness.serve(prompt)
    assert harness.manager.stats().counters.host_hit_tokens - host_hits == BLOCK
