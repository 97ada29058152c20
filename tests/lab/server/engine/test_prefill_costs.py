"""What computing costs, as the engine measures it: a step takes as long as its copies or its compute."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fastdeploy_kvcache_v1.config import KVCacheConfig, WritePolicy
from fastdeploy_kvcache_v1.contract.messages import CacheLevel
from tests.lab.server.harness import Harness, expected_outputs

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

    def work(self, batch):
        result = self.worker.run(batch)
        compute_s = sum(len(task.token_ids) for task in batch.requests) * self.token_s
        answers = [self.answer(result, compute_s * compute, copy) for copy, compute in self.speeds]
        self.now += STEP_S + max(seconds for seconds, _ in answers)
        for rank, (_, answer) in enumerate(answers):
            self.core.on_step_result(answer, rank)
        self.manager.check()

    def answer(self, result, compute_s, copy_share):
        """How long a rank takes for a step, the wait for its own copies included, and what it says."""
        transfers, copying = [], 0.0
        for transfer in result.report.transfers:
            is_swap_in = transfer.target is CacheLevel.DEVICE
            seconds = transfer.num_blocks * BLOCK * (self.copy_s * copy_share if is_swap_in else SWAP_OUT_S)
            copying += seconds if is_swap_in else 0.0
            transfers.append(replace(transfer, seconds=seconds))
        waited = max(0.0, copying - compute_s)
        report = replace(result.report, transfers=tuple(transfers), exposed_wait_since_last_s=waited)
        return compute_s + waited, replace(result, report=report)

    def serve(self, prompt):
        """Seconds to the first token."""
        self.num_prompts += 1
        began, recorder = self.now, self.submit(str(self.num_prompts), prompt, 1)
        self.run()
        assert recorder.tokens == expected_outputs(prompt, 1)
        return self.now - began

    def push_out(self):
        """Whatever is on the device leaves it; all of it is on the host by then."""
        self.num_prompts += 1
        self.serve([1000 + self.num_prompts] * 555)


def test_steps_with_swap_ins_do_not_change_prefill_costs_of_several_ranks():
    """Rank 0 computes for 64 s while rank 1 waits for its copies: subtracting that wait would leave 64 s less."""
    harness = TimedHarness(1.0, speeds=((0.01, 1.0), (1.0, 0.1)))
    harness.serve(range(200))
    harness.push_out()
    before = harness.core.prefill_costs.seconds(0, 80)
    for _ in range(3):
        harness.serve([*range(200), *range(900, 964)])
        harness.push_out()
    assert harness.manager.stats().counters.host_hit_tokens >= 600
    assert harness.core.prefill_costs.seconds(0, 80) == pytest.approx(before, rel=0.1)


def test_step_with_swap_ins_updates_prefill_costs_of_a_single_rank():
    harness = TimedHarness(1.0)
    harness.serve(range(200))
    harness.push_out()
    harness.token_s = 3.0
    before = harness.core.prefill_costs.seconds(0, 80)
    harness.serve([*range(200), *range(900, 964)])
    assert harness.manager.stats().counters.host_hit_tokens == 200
    assert harness.core.prefill_costs.seconds(0, 80) > 1.2 * before


def test_steps_that_only_decode_say_nothing_of_prompts():
    """70 one-token prompts are as good as decoding: they take an hour each here."""
    harness = TimedHarness(2.0, max_num_seqs=70)
    harness.serve(range(200))
    before = harness.core.prefill_costs.seconds(0, 80)
    harness.token_s = 3600.0
    for index in range(70):
        harness.submit(f"short {index}", [index], 1)
    harness.run()
    assert harness.core.prefill_costs.seconds(0, 80) == before
