"""A pass fails after the engine has counted on it: its blocks can be matched, and nobody reads what is not there."""

import pytest

from fastdeploy_kvcache_v1.errors import ModelError
from fastdeploy_kvcache_v1.fastdeploy_integration.cpu_worker.batch_rows import FAILED

from .host_tasks import ABORT, other, prefill
from .test_runner import (
    BLOCK,
    PROMPT,
    decode_alone,
    expected,  # noqa: F401  # a fixture
    make_runner,  # noqa: F401  # a fixture
    model,  # noqa: F401  # a fixture
    run,
    with_swaps,
)

LONG = PROMPT[:16] + list(range(50, 66))
"""Four blocks; PROMPT has the first two."""


def fail_next_pass(runner):
    """Halfway: the blocks hold something, and not what they should."""
    forward = runner._decoder.forward

    def failing(sequences, caches, before_layer):
        runner._decoder.forward = forward
        forward(sequences, caches, before_layer)
        for cache in caches:
            for sequence in sequences:
                first, end = sequence.start // BLOCK, -(-(sequence.start + len(sequence.token_ids)) // BLOCK)
                for slot in list(sequence.block_table)[first:end]:
                    cache[int(slot)] = 7.0
        raise ModelError("the pass broke")

    runner._decoder.forward = failing


@pytest.fixture
def runner(make_runner):  # noqa: F811
    return make_runner()


def tokens(said):
    return [token for token in said if token >= 0]


def test_who_was_given_blocks_of_a_failed_pass_computes_them(runner, expected):  # noqa: F811
    runner.insert_tasks([prefill(0, "a", PROMPT, range(5))])
    fail_next_pass(runner)
    assert run(runner, 1) == [FAILED]
    runner.insert_tasks([prefill(0, "b", PROMPT, [0, 1, 8, 9, 10], start=16)])  # matched: two blocks of a
    assert tokens(run(runner, 8))[:6] == expected


def test_who_reads_more_of_them_later_computes_the_rest(runner, model, expected):  # noqa: F811
    """The first reader repairs two of the four blocks: the others stay as they are."""
    runner.insert_tasks([prefill(0, "a", LONG, range(5))])
    fail_next_pass(runner)
    assert run(runner, 1) == [FAILED]
    runner.insert_tasks([prefill(0, "b", PROMPT, [0, 1, 8, 9, 10], start=16)])
    assert tokens(run(runner, 8))[:6] == expected
    runner.insert_tasks([other(ABORT, 0, "b")])
    run(runner, 1)
    runner.insert_tasks([prefill(0, "c", LONG, [0, 1, 2, 3, 12], start=24)])
    assert tokens(run(runner, 4))[:2] == decode_alone(model, LONG, 2)


def test_only_the_chunk_that_failed_is_computed_again(runner, model):  # noqa: F811
    runner.insert_tasks([prefill(0, "a", LONG, range(2), end=16)])
    run(runner, 1)
    runner.insert_tasks([prefill(0, "a", LONG, range(5), start=16)])
    fail_next_pass(runner)
    assert run(runner, 1) == [FAILED]
    assert runner._controller.failed_slots(range(16)) == [2, 3]
    runner.insert_tasks([prefill(0, "c", LONG, [0, 1, 2, 3, 12], start=24)])
    assert tokens(run(runner, 4))[:2] == decode_alone(model, LONG, 2)
    assert runner._controller.failed_slots(range(16)) == []


def test_a_decoding_row_whose_block_is_spoiled_under_it_goes_on(runner, expected):  # noqa: F811
    """FastDeploy computes the last block of a prompt again that is cached as a whole."""
    runner.insert_tasks([prefill(0, "a", PROMPT, range(5))])
    said = run(runner, 2)
    runner.insert_tasks([prefill(1, "b", PROMPT[:16], [0, 1, 9], start=8)])
    fail_next_pass(runner)
    runner.execute(2)
    assert runner.messages[-1][0] == [FAILED, FAILED], "they share the pass"
    runner.insert_tasks([prefill(0, "c", PROMPT, [0, 1, 12, 13, 14], start=16)])
    assert said == expected[:2]
    assert tokens(run(runner, 8))[:6] == expected


def test_what_was_not_computed_does_not_reach_the_host(make_runner, expected):  # noqa: F811
    reports = []
    runner = make_runner(tell_copies=reports.append)
    runner.insert_tasks([prefill(0, "a", PROMPT, range(5))])
    fail_next_pass(runner)
    assert run(runner, 1) == [FAILED]
    runner.insert_tasks([with_swaps(prefill(0, "b", PROMPT[:4], [9]), 0, evict=((0, 8), (0, 1)))])
    run(runner, 2)
    while runner.not_need_stop() and runner._steps.has_open_copies:
        runner.execute(1)
    copies = [result for report in reports for result in report.transfers]
    assert [(result.step, result.ok) for result in copies] == [(0, False)]
