"""Rows of the worker: what is computed, what is said, and when a sequence ends. Messages are compared as a whole."""

import pytest

from fastdeploy_kvcache_v1.errors import CacheStateError
from fastdeploy_kvcache_v1.fastdeploy_integration.cpu_worker.batch_rows import (
    NO_TOKEN,
    RELEASED,
    BatchRows,
    FinishRules,
    RunningSequence,
)

END = 99
BLOCK = 4


def sequence(prompt, *, outputs=(), computed=0, target=None, blocks=8, **rules):
    tokens = [*prompt, *outputs]
    return RunningSequence(
        request_id="r",
        tokens=tokens,
        prompt_length=len(prompt),
        computed=computed,
        target=len(tokens) if target is None else target,
        block_table=list(range(blocks)),
        rules=FinishRules(**{"end_tokens": (END, 98), "max_tokens": 100, **rules}),
    )


@pytest.fixture
def table():
    return BatchRows(BLOCK)


def step(table, *sampled, rows=1):
    """One step in which the rows that sample get `sampled`, in row order. Returns the message."""
    runnable = table.runnable()
    wanting = [row for row, each in runnable.items() if each.samples]
    assert len(wanting) == len(sampled)
    return table.end_step(rows, runnable, dict(zip(wanting, sampled, strict=True)))


@pytest.mark.parametrize(
    ("given", "steps", "goes_on"),
    [
        # a sequence, what its steps sample (None: nothing) and say, whether it is still there
        ({"prompt": [1, 2, 3]}, [(10, 10), (11, 11)], True),
        ({"prompt": [1]}, [(98, 98)], False),
        ({"prompt": [1], "max_tokens": 2}, [(7, 7), (8, END)], False),
        ({"prompt": [1], "outputs": [7, 7], "max_tokens": 3}, [(8, END)], False),  # it was preempted
        ({"prompt": [1], "stop_sequences": ((5, 6), ())}, [(5, 5), (6, 6), (None, END)], False),
        ({"prompt": [1], "outputs": [5], "stop_sequences": ((5,),)}, [(None, END)], False),  # from another server
        (
            {"prompt": [5], "stop_sequences": ((5, 6), (8,)), "min_tokens": 3},  # in the prompt, or too early
            [(6, 6), (8, 8), (6, 6), (8, 8), (None, END)],
            False,
        ),
    ],
)
def test_each_step_says_its_token_until_the_sequence_ends(table, given, steps, goes_on):
    table.start(0, sequence(**given))
    for sampled, said in steps:
        assert table.has_work
        assert step(table, *([] if sampled is None else [sampled])) == [said]
    assert bool(table.sequences) == table.has_work == goes_on


def test_a_chunk_says_nothing_and_waits_for_the_next_one(table):
    table.start(0, sequence(range(10), target=8))
    assert step(table) == [NO_TOKEN]
    assert not table.has_work
    table.start(0, sequence(range(10), computed=8))
    assert step(table, 5) == [5]


def test_an_end_token_may_come_only_after_min_tokens(table):
    table.start(0, sequence([1], min_tokens=2))
    for _ in range(2):
        assert not table.sequences[0].may_end
        step(table, 5)
    assert table.sequences[0].may_end


def test_a_decode_task_for_an_ended_sequence_does_nothing(table):
    table.set_blocks(3, [1])
    assert not table.sequences


def test_a_released_row_says_so_once_even_beyond_the_batch(table):
    table.start(0, sequence([1]))
    table.start(2, sequence([1]))
    table.release(2)
    assert table.has_work
    assert step(table, 5, rows=1) == [5, NO_TOKEN, RELEASED]
    assert step(table, 5, rows=1) == [5]


@pytest.mark.parametrize(("computed", "target"), [(2, 2), (0, 4), (-1, 2)])
def test_a_task_that_asks_for_no_or_unknown_tokens_is_a_bug(table, computed, target):
    with pytest.raises(CacheStateError, match="request r asks for tokens"):
        table.start(0, sequence([1, 2, 3], computed=computed, target=target))
