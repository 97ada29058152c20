import pytest

from fastdeploy_kvcache_v1.fastdeploy_integration.cpu_worker import tasks
from fastdeploy_kvcache_v1.fastdeploy_integration.cpu_worker.batch_rows import BatchRows, FinishRules
from fastdeploy_kvcache_v1.fastdeploy_integration.cpu_worker.hooks import check_parameters
from fastdeploy_kvcache_v1.fastdeploy_integration.cpu_worker.tasks import apply_task, sampling_params

from .host_tasks import ABORT, DECODE, EXTEND, PREEMPTED, other, prefill


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
    params = sampling_params(prefill(0, "r", [1], [0], **given), (4,))
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == expected
    assert (params.seed, params.banned_tokens) == (3, (4,))


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
