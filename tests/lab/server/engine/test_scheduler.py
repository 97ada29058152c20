"""Who runs in a step, with how many tokens, and who has to go."""

import pytest

from fastdeploy_kvcache_v1.config import KVCacheConfig, WritePolicy
from fastdeploy_kvcache_v1.lab.model.step import StepResult
from fastdeploy_kvcache_v1.lab.server.engine.generation import Failure, State
from tests.lab.server.harness import Harness, expected_outputs


def tokens_of(batch):
    """Number of tokens computed per request, in the order of the batch."""
    return [(task.request_id, len(task.token_ids)) for task in batch.requests]


def test_long_prompt_is_cut_into_chunks_of_the_token_budget():
    harness = Harness(KVCacheConfig(32, block_size=4), max_num_batched_tokens=8)
    recorder = harness.submit("a", range(20), 2)
    assert [tokens_of(harness.step()) for _ in range(4)] == [[("a", 8)], [("a", 8)], [("a", 4)], [("a", 1)]]
    assert recorder.tokens == expected_outputs(range(20), 2)


def test_only_the_chunk_that_reaches_the_end_is_sampled():
    harness = Harness(KVCacheConfig(32, block_size=4), max_num_batched_tokens=8)
    harness.submit("a", range(20), 1)
    assert [harness.step().requests[0].needs_logits for _ in range(3)] == [False, False, True]


def test_decoding_requests_are_served_before_an_earlier_prefill():
    harness = Harness(KVCacheConfig(64, block_size=4), max_num_batched_tokens=8)
    harness.submit("long", range(30), 1)
    harness.submit("short", [99, 98, 97], 5)
    harness.step()
    harness.submit("shorter", [96], 5)
    batches = [tokens_of(harness.step()) for _ in range(4)]
    assert batches == [[("long", 8)], [("long", 8)], [("long", 6), ("short", 2)], [("short", 1), ("shorter", 1)]]
    harness.submit("longer", range(50, 70), 1)
    assert tokens_of(harness.step()) == [("short", 1), ("shorter", 1), ("longer", 6)]


def lose_copy_of(harness, name):
    """One step in which every request but `name` advances: a copy that it needs fails."""
    harness.core.step()
    result = harness.worker.run(harness.sent.pop())
    tokens = {request: token for request, token in result.tokens.items() if request != name}
    harness.core.on_step_result(StepResult(tokens=tokens, retry={name: "torn"}, report=result.report))


def decoder_beside_an_earlier_prefill(num_device_blocks, prompt, num_outputs):
    """The only way there: the earlier arrival lost a copy, and has to compute its prompt and 4 outputs again."""
    config = KVCacheConfig(num_device_blocks, block_size=4, enable_prefix_caching=False)
    harness = Harness(config, max_num_batched_tokens=8)
    prefill = harness.submit("prefill", prompt, 6)
    while not prefill.events:
        harness.step()
    decoder = harness.submit("decoder", [96, 97, 98, 99], num_outputs)
    assert tokens_of(harness.step()) == [("prefill", 1), ("decoder", 4)]
    assert [tokens_of(harness.step()) for _ in range(2)] == [[("prefill", 1), ("decoder", 1)]] * 2
    lose_copy_of(harness, "prefill")
    return harness, prefill, decoder


def test_decoding_request_is_not_stalled_by_an_earlier_prefill():
    harness, prefill, decoder = decoder_beside_an_earlier_prefill(64, range(11), 9)
    assert [tokens_of(harness.step()) for _ in range(3)] == [
        [("decoder", 1), ("prefill", 7)],
        [("decoder", 1), ("prefill", 7)],
        [("prefill", 1), ("decoder", 1)],
    ]
    harness.run()
    assert prefill.tokens == expected_outputs(range(11), 6)
    assert decoder.tokens == expected_outputs([96, 97, 98, 99], 9)


def test_budget_of_a_preempted_request_goes_to_the_request_that_needed_it():
    """The decoder has been planned with its fourth block, more than it was thought to need soon, when the prefill
    finds only one of its last two.
    """
    harness, prefill, decoder = decoder_beside_an_earlier_prefill(16, range(47), 20)
    batches = [tokens_of(harness.step()) for _ in range(7)]
    assert batches == [[("decoder", 1), ("prefill", 7)]] * 6 + [[("prefill", 8)]]
    assert harness.num_preemptions == 2, "one for the lost copy, one for the blocks"
    harness.run()
    assert prefill.tokens == expected_outputs(range(47), 6)
    assert decoder.tokens == expected_outputs([96, 97, 98, 99], 20)


def test_max_num_seqs_bounds_the_running_requests_in_order_of_arrival():
    harness = Harness(KVCacheConfig(32, block_size=4), max_num_seqs=2)
    for name in "abc":
        harness.submit(name, [ord(name)], 2)
    assert tokens_of(harness.step()) == [("a", 1), ("b", 1)]
    assert [generation.request_id for generation in harness.scheduler.waiting] == ["c"]
    harness.step()
    assert tokens_of(harness.step()) == [("c", 1)]


def test_latest_arrival_is_preempted_and_resumes_from_its_cached_blocks():
    harness = Harness(KVCacheConfig(4, block_size=4), max_num_batched_tokens=16)
    first = harness.submit("first", range(4), 9)
    second = harness.submit("second", range(50, 54), 9)
    preempted_at = None
    batches = []
    while (batch := harness.step()) is not None:
        batches.append(tokens_of(batch))
        if harness.num_preemptions and preempted_at is None:
            preempted_at = len(batches)
            assert [generation.request_id for generation in harness.scheduler.waiting] == ["second"]
            assert batches[-1] == [("first", 1)], "the earlier request advances in the very step that preempts"
    assert preempted_at is not None
    assert first.tokens == expected_outputs(range(4), 9)
    assert second.tokens == expected_outputs(range(50, 54), 9)
    assert len(batches[-1]) == 1
    assert batches[-1][0][0] == "second"
    harness.manager.check_idle()
    counters = harness.manager.stats().counters
    assert (counters.requests_admitted, counters.query_tokens, counters.device_hit_tokens) == (2, 8, 0)
    assert counters.requests_resumed == harness.num_preemptions
    assert counters.resumed_hit_tokens > 0, "its own work, which is no hit"


def test_preempted_request_does_not_take_its_space_back_in_the_same_step():
    harness = Harness(KVCacheConfig(5, block_size=4), max_num_batched_tokens=16)
    harness.submit("first", range(8), 8)
    harness.submit("second", range(50, 54), 8)
    while not harness.num_preemptions:
        before = {generation.request_id for generation in harness.scheduler.running}
        batch = harness.step()
    assert before == {"first", "second"}
    assert [task.request_id for task in batch.requests] == ["first"]
    harness.run()


def computed_tokens(harness, requests):
    """With what an engine computes that computes nothing twice."""
    recorders = [harness.submit(str(index), prompt, length) for index, (prompt, length) in enumerate(requests)]
    harness.run()
    assert [recorder.tokens for recorder in recorders] == [expected_outputs(*request) for request in requests]
    return harness.core.counters.computed_tokens, sum(len(prompt) + length - 1 for prompt, length in requests)


@pytest.mark.parametrize("caching", [True, False])
def test_prompts_that_do_not_fit_together_are_computed_once(caching):
    config = KVCacheConfig(100, block_size=4, enable_prefix_caching=caching)
    harness = Harness(config, max_num_seqs=64, max_num_batched_tokens=64)
    computed, ideal = computed_tokens(harness, [([index, *range(299)], 30) for index in range(8)])
    assert (computed, harness.num_preemptions) == (ideal, 0)


def test_newcomer_leaves_a_running_prompt_the_room_for_all_its_chunks():
    """11 of 16 blocks for the first prompt and its growth, 2 of which it holds; the second wants 6."""
    config = KVCacheConfig(16, block_size=4, enable_prefix_caching=False)
    harness = Harness(config, max_num_batched_tokens=8)
    harness.submit("first", range(40), 4)
    assert tokens_of(harness.step()) == [("first", 8)]
    harness.submit("second", range(50, 70), 4)
    batches = [tokens_of(harness.step()) for _ in range(9)]
    assert batches[:4] == [[("first", 8)]] * 4
    assert batches[4:] == [[("first", 1)]] * 3 + [[("second", 8)]] * 2
    harness.run()
    assert harness.num_preemptions == 0


def test_requests_admitted_in_one_step_count_each_others_prompts():
    """The budget gives each of them a chunk, the tier has room for two of the prompts: 2 * (3 + 1) of 10 blocks."""
    config = KVCacheConfig(10, block_size=4, enable_prefix_caching=False)
    harness = Harness(config, max_num_batched_tokens=32)
    for first in (0, 20, 40):
        harness.submit(str(first), range(first, first + 12), 8)
    assert tokens_of(harness.step()) == [("0", 12), ("20", 12)]
    harness.run()


def test_request_that_fills_the_tier_is_admitted_when_it_is_alone():
    config = KVCacheConfig(4, block_size=4, enable_prefix_caching=False)
    harness = Harness(config, max_num_batched_tokens=8)
    small = harness.submit("small", range(4), 2)
    full = harness.submit("full", range(50, 63), 4)
    behind = harness.submit("behind", range(4), 2)
    batches = []
    while (batch := harness.step()) is not None:
        batches.append(tokens_of(batch))
    assert batches == [
        [("small", 4)],
        [("small", 1)],
        [("full", 8)],
        [("full", 5)],
        *[[("full", 1)]] * 3,
        [("behind", 4)],
        [("behind", 1)],
    ], "16 tokens in 16 places, and whoever came later does not overtake"
    for recorder, request in ((small, (range(4), 2)), (full, (range(50, 63), 4)), (behind, (range(4), 2))):
        assert recorder.tokens == expected_outputs(*request)


def test_request_that_no_empty_tier_can_hold_fails_and_the_next_is_served():
    """The server refuses it before; here it must not keep the others waiting."""
    harness = Harness(KVCacheConfig(4, block_size=4), max_num_batched_tokens=8)
    giant = harness.submit("giant", range(17), 1)
    other = harness.submit("other", range(4), 2)
    harness.run()
    fault = "the request does not fit the device tier although nothing else runs"
    assert giant.failure == Failure(500, f"{fault}: raise --num-gpu-blocks-override")
    assert other.tokens == expected_outputs(range(4), 2)
    assert harness.core.counters.failed == 1


def test_two_requests_share_the_slots_of_one_planned_swap_in():
    """5 slots for the first of them, and one for the second: it needs none for what is being swapped in already."""
    harness = Harness(KVCacheConfig(8, 16, block_size=4, write_policy=WritePolicy.WRITE_THROUGH))
    for name, first in (("first", 0), ("others", 100), ("more", 200)):  # the others push it off the device
        harness.submit(name, range(first, first + 18), 2)
        harness.run()
    pair = [harness.submit(name, range(18), 2) for name in ("one", "two")]
    batch = harness.step()
    assert tokens_of(batch) == [("one", 2), ("two", 2)]
    assert [len(step.swap_in) for step in batch.swap_steps] == [4]
    harness.run()
    assert [recorder.tokens for recorder in pair] == [expected_outputs(range(18), 2)] * 2


def test_preempted_requests_wait_first_in_their_order_of_arrival():
    harness = Harness(KVCacheConfig(64, block_size=4), max_num_seqs=4)
    recorders = [harness.submit(name, [ord(name)], 3) for name in "abcdef"]
    harness.step()
    running = {generation.request_id: generation for generation in harness.scheduler.running}
    for name, expected in (("c", "cef"), ("a", "acef"), ("d", "acdef"), ("b", "abcdef")):
        harness.scheduler.preempt(running[name])
        assert "".join(generation.request_id for generation in harness.scheduler.waiting) == expected
    harness.run()
    assert [recorder.tokens for recorder in recorders] == [expected_outputs([ord(name)], 3) for name in "abcdef"]


def test_newcomer_waits_while_running_requests_need_the_last_blocks():
    harness = Harness(KVCacheConfig(3, block_size=4), max_num_batched_tokens=16)
    harness.submit("first", range(6), 4)
    harness.step()
    harness.submit("second", range(50, 54), 4)
    assert tokens_of(harness.step()) == [("first", 1)], "one free block, but the running request may need it"
    harness.run()
    assert harness.num_preemptions == 0


def test_request_that_waits_for_room_leaves_no_trace():
    harness = Harness(KVCacheConfig(4, block_size=4), max_num_batched_tokens=16)
    harness.submit("first", range(8), 8)
    harness.step()
    harness.submit("second", [*range(4), *range(60, 68)], 2)
    harness.scheduler.schedule()  # the running request takes its next block
    for _ in range(1000):
        available = harness.manager.num_available_device_blocks
        harness.scheduler.schedule()
        assert harness.manager.num_available_device_blocks == available
    assert harness.scheduler.waiting[0].state is State.WAITING
    harness.run()


def test_finish_in_every_state():
    harness = Harness(KVCacheConfig(8, block_size=4), max_num_seqs=1)
    harness.submit("running", range(4), 4)
    harness.submit("waiting", range(4), 4)
    harness.step()
    generations = [*harness.scheduler.running, *harness.scheduler.waiting]
    for generation in generations:
        harness.scheduler.finish(generation)
        assert generation.state is State.FINISHED
    assert harness.scheduler.is_idle
    harness.manager.take_swap_step()
    harness.manager.check_idle()
