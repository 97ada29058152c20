"""Who runs in a step, with how many tokens, and who has to go."""

from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.embedded.generation import State
from fastdeploy_kvcache_v1.embedded.messages import StepResult
from tests.server.shadow import Harness, expected_outputs


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
    assert batches == [
        [("long", 8)],
        [("long", 8)],
        [("long", 6), ("short", 2)],
        [("short", 1), ("shorter", 1)],
    ]
    harness.submit("longer", range(50, 70), 1)
    assert tokens_of(harness.step()) == [("short", 1), ("shorter", 1), ("longer", 6)]


def lose_copy_of(harness, name):
    """One step in which every request but `name` advances: a copy that it needs fails."""
    harness.core.step()
    result = harness.worker.run(harness.sent.pop())
    tokens = {request: token for request, token in result.tokens.items() if request != name}
    harness.core.on_step_result(StepResult(tokens=tokens, retry={name: "torn"}, report=result.report))


def decoder_beside_an_earlier_prefill(num_device_blocks):
    """The only way there: the earlier arrival lost a copy, and has to compute its 15 tokens again."""
    config = KVCacheConfig(num_device_blocks, block_size=4, enable_prefix_caching=False)
    harness = Harness(config, max_num_batched_tokens=8)
    prefill = harness.submit("prefill", range(11), 6)
    assert [tokens_of(harness.step()) for _ in range(2)] == [[("prefill", 8)], [("prefill", 3)]]
    decoder = harness.submit("decoder", [96, 97, 98, 99], 9)
    assert tokens_of(harness.step()) == [("prefill", 1), ("decoder", 4)]
    assert [tokens_of(harness.step()) for _ in range(2)] == [[("prefill", 1), ("decoder", 1)]] * 2
    lose_copy_of(harness, "prefill")
    return harness, prefill, decoder


def test_decoding_request_is_not_stalled_by_an_earlier_prefill():
    harness, prefill, decoder = decoder_beside_an_earlier_prefill(64)
    assert [tokens_of(harness.step()) for _ in range(3)] == [
        [("decoder", 1), ("prefill", 7)],
        [("decoder", 1), ("prefill", 7)],
        [("prefill", 1), ("decoder", 1)],
    ]
    harness.run()
    assert prefill.tokens == expected_outputs(range(11), 6)
    assert decoder.tokens == expected_outputs([96, 97, 98, 99], 9)


def test_tokens_of_a_request_preempted_in_the_same_step_go_to_the_one_that_needed_its_blocks():
    """The decoder has been planned with its third block when the prefill finds none for its fourth."""
    harness, prefill, decoder = decoder_beside_an_earlier_prefill(6)
    assert [tokens_of(harness.step()) for _ in range(2)] == [[("decoder", 1), ("prefill", 7)], [("prefill", 8)]]
    assert harness.scheduler.num_preemptions == 2, "one for the lost copy, one for the blocks"
    harness.run()
    assert prefill.tokens == expected_outputs(range(11), 6)
    assert decoder.tokens == expected_outputs([96, 97, 98, 99], 9)


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
        if harness.scheduler.num_preemptions and preempted_at is None:
            preempted_at = len(batches)
            assert [generation.request_id for generation in harness.scheduler.waiting] == ["second"]
            assert batches[-1] == [("first", 1)], "the earlier request advances in the very step that preempts"
    assert preempted_at is not None
    assert first.tokens == expected_outputs(range(4), 9)
    assert second.tokens == expected_outputs(range(50, 54), 9)
    assert len(batches[-1]) == 1
    assert batches[-1][0][0] == "second"
    harness.manager.check_idle()


def test_preempted_request_does_not_take_its_space_back_in_the_same_step():
    harness = Harness(KVCacheConfig(4, block_size=4), max_num_batched_tokens=16)
    harness.submit("first", range(8), 8)
    harness.submit("second", range(50, 54), 8)
    while not harness.scheduler.num_preemptions:
        before = {generation.request_id for generation in harness.scheduler.running}
        batch = harness.step()
    assert before == {"first", "second"}
    assert [task.request_id for task in batch.requests] == ["first"]
    harness.run()


def test_nobody_is_admitted_in_a_step_that_preempts():
    """The first chunk of the preempted request has room at once; what it lacked is missing after it all the same."""
    config = KVCacheConfig(6, block_size=4, enable_prefix_caching=False)
    harness = Harness(config, max_num_batched_tokens=8)
    first = harness.submit("first", range(8), 8)
    harness.step()
    second = harness.submit("second", range(50, 62), 4)
    assert [tokens_of(harness.step()) for _ in range(4)] == [
        [("first", 1), ("second", 7)],
        [("first", 1), ("second", 5)],
        [("first", 1)],
        [("first", 1), ("second", 7)],
    ]
    assert harness.scheduler.num_preemptions == 1
    harness.run()
    assert first.tokens == expected_outputs(range(8), 8)
    assert second.tokens == expected_outputs(range(50, 62), 4)


def test_newcomer_waits_while_running_requests_need_the_last_blocks():
    harness = Harness(KVCacheConfig(3, block_size=4), max_num_batched_tokens=16)
    harness.submit("first", range(6), 4)
    harness.step()
    harness.submit("second", range(50, 54), 4)
    assert tokens_of(harness.step()) == [("first", 1)], "one free block, but the running request may need it"
    harness.run()
    assert harness.scheduler.num_preemptions == 0


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
