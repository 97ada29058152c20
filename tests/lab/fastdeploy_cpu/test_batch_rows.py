"""Rows of the worker: what is computed, what is said, and when a sequence ends. Messages are compared as a whole."""

import pytest

from fastdeploy_kvcache_v1.errors import CacheStateError
from fastdeploy_kvcache_v1.lab.fastdeploy_cpu import tasks
from fastdeploy_kvcache_v1.lab.fastdeploy_cpu.batch_rows import (
    NO_TOKEN,
    RELEASED,
    BatchRows,
    FinishRules,
    RunningSequence,
)
from fastdeploy_kvcache_v1.lab.fastdeploy_cpu.hooks import check_parameters
from fastdeploy_kvcache_v1.lab.fastdeploy_cpu.tasks import apply_task, sampling_params

from .host_tasks import ABORT, DECODE, EXTEND, PREEMPTED, other, prefill

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
    with pytest.raises(CacheStateError, match="of request r, expected a part of its"):
        table.start(0, sequence([1, 2, 3], computed=computed, target=target))


# ---- what a task of FastDeploy's becomes


def test_a_prefill_task_becomes_a_slot():
    table = BatchRows(4)
    stops = {"stop_token_ids": [[5, 6, -1], [7, -1, -1]], "stop_seqs_len": [2, 1, 0, 0]}
    apply_task(table, prefill(2, "r", [9, 8], [3, 4], outputs=[7], end=2, min_tokens=4, **stops))
    sequence = table.sequences[2]
    assert (sequence.request_id, sequence.tokens, sequence.prompt_length) == ("r", [9, 8, 7], 2)
    assert (sequence.computed, sequence.target, sequence.block_table) == (0, 2, [3, 4])
    assert sequence.rules == FinishRules((1,), max_tokens=20, min_tokens=4, stop_sequences=((5, 6), (7,)))


def test_other_tasks():
    table = BatchRows(4)
    for row in range(4):
        apply_task(table, prefill(row, f"r{row}", [9], [row]))
    apply_task(table, other(DECODE, 0, "r0", [0, 5]))
    for row, kind in enumerate((PREEMPTED, EXTEND, ABORT), start=1):
        apply_task(table, other(kind, row, f"r{row}"))
    assert table.sequences[0].block_table == [0, 5]
    assert (set(table.sequences), table.released) == ({0}, {1, 2, 3})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"top_k": 1, "temperature": 1}, (1.0, 1.0, 1, 0.0)),
        ({"top_k": 0, "temperature": 0.5, "top_p": 0.9}, (0.5, 0.9, 0, 0.0)),
        ({"top_k": None, "temperature": None, "top_p": None, "min_p": None}, (1.0, 1.0, 0, 0.0)),
        ({"top_k": 40, "temperature": 1, "top_p": 0, "min_p": 0.1}, (1.0, 1.0, 40, 0.1)),
    ],
)
def test_sampling_parameters(given, expected):
    params = sampling_params(prefill(0, "r", [1], [0], **given))
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == expected
    assert params.seed == 3


NOTHING = {
    "response_format": {"type": "text", "json_schema": None},
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "bad_words": [],
}


@pytest.mark.parametrize("given", [{}, NOTHING, dict.fromkeys(tasks.NEUTRAL)])
def test_a_request_that_asks_for_nothing_special_is_served(given):
    assert check_parameters(lambda data: "checked", None, (given,), {}) == "checked"


@pytest.mark.parametrize("name", tasks.NEUTRAL)
def test_what_the_worker_does_not_have_is_found_whatever_its_value(name):
    assert tasks.unsupported({**NOTHING, name: "x"}) == name
