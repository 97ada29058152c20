"""What a pass may write: against a row that grows by itself, and the single rules by hand. The world has many rows."""

import random
from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1.fastdeploy_integration.transport import TaskKind
from fastdeploy_kvcache_v1.fastdeploy_integration.worker.running_tables import RunningTables
from tests.fastdeploy_integration.worker.draft_rows import DraftRow

SIZE = 4
LONG_TABLE = list(range(1000, 1400))


def task(kind, table=(), start=0, end=0, index=0, **fields):
    return SimpleNamespace(
        task_type=SimpleNamespace(value=int(kind)),
        idx=index,
        block_tables=list(table),
        prefill_start_index=start,
        prefill_end_index=end,
        **fields,
    )


STEPS = [(0, 1), (1, 1), (2, 1), (2, 2), (3, 2), (5, 1), (5, 3), (5, 5)]
"""Tokens that are drafted, and steps that the draft model takes for them."""


@pytest.mark.parametrize("truncates", [True, False])
@pytest.mark.parametrize(("draft_tokens", "model_steps"), STEPS)
@pytest.mark.parametrize("block_size", [1, 3])
def test_every_position_that_a_pass_writes_is_named(draft_tokens, model_steps, truncates, block_size):
    """With blocks of one token every position counts."""
    rng = random.Random(f"{draft_tokens} {model_steps} {truncates} {block_size}")
    lowest = highest = 0
    for _ in range(60):
        row = DraftRow(rng, draft_tokens=draft_tokens, model_steps=model_steps, truncates=truncates)
        tables, position = RunningTables(block_size, draft_tokens), 20
        for _ in range(rng.randint(1, 3)):
            end = position + rng.randint(1, 9)
            tables.update([task(TaskKind.PREFILL, LONG_TABLE, position, end)])
            check(tables, row.chunk(position, end), block_size)
            position = end
        for _ in range(rng.randint(1, 40)):
            row.is_paused = rng.random() < 0.1
            if rng.random() < 0.3:  # the engine is some passes behind, and the last token it has is without KV
                heard = max(position, row.length - rng.randint(0, 3 * draft_tokens + 3))
                tables.hear([(0, heard + 1)])
            before = row.length
            written = row.decode()
            check(tables, written, block_size)
            if written:
                lowest, highest = min(lowest, min(written) - before), max(highest, max(written) - before)
    assert lowest == -draft_tokens, "the draft model starts over as far behind as it can"
    assert highest == draft_tokens + model_steps - 1, "and goes as far ahead"


def check(tables, written, block_size):
    assert {LONG_TABLE[each // block_size] for each in written} <= {*tables.written()} <= {*tables.read()}
    tables.pass_submitted()


TABLE = [10, 11, 12, 13, 14, 15]


def decoding(draft_tokens=0, end=9):
    """A row of 24 slots whose prompt of `end` tokens has been computed."""
    tables = RunningTables(SIZE, draft_tokens)
    tables.update([task(TaskKind.PREFILL, TABLE, 0, end)])
    tables.pass_submitted()
    return tables


def test_a_row_that_decodes_without_a_word_is_followed_pass_by_pass():
    tables = decoding(end=11)
    assert {*tables.written()} == {12}, "position 11"
    tables.pass_submitted()
    assert {*tables.written()} == {12, 13}, "it may have paused at 11, and may be at 12"
    for _ in range(4):
        tables.pass_submitted()
    assert {*tables.written()} == {12, 13, 14}
    tables.hear([(0, 17)])  # of the 17th token, at 16, the KV is still to come
    assert {*tables.written()} == {14}
    for _ in range(100):
        tables.pass_submitted()
    assert {*tables.written()} == {14, 15}, "beyond its table no row writes"


def test_a_row_that_ended_is_named_until_the_engine_says_so():
    tables = decoding()
    tables.hear([(0, 10), (1, 5)])
    assert {*tables.written()} == {12}
    assert {*tables.read()} == set(TABLE)
    tables.hear([(1, 5)])
    assert {*tables.written()} == {*tables.read()} == set()


def test_what_the_engine_says_is_older_than_a_chunk_of_the_same_batch():
    tables = RunningTables(SIZE)
    tables.update([task(TaskKind.PREFILL, TABLE, 0, 8)])
    tables.hear([])
    assert {*tables.written()} == {10, 11}
    tables.hear([(0, 8)])
    assert {*tables.written()} == {10, 11}


@pytest.mark.parametrize("kind", [TaskKind.PREEMPTED, TaskKind.ABORT])
def test_a_row_that_is_taken_away_is_not_named(kind):
    tables = decoding()
    tables.update([task(kind)])
    assert {*tables.written()} == {*tables.read()} == set()


def test_a_table_that_grows_and_one_that_is_another():
    tables = decoding()
    tables.update([task(TaskKind.DECODE, [*TABLE, 20, 21])])
    assert {*tables.read()} == {*TABLE, 20, 21}
    assert {*tables.written()} == {12}
    tables.update([task(TaskKind.DECODE, [30, 31, 32])])
    assert {*tables.read()} == {30, 31, 32}
    assert {*tables.written()} == {32}


def test_of_a_row_that_was_never_announced_the_whole_table_is_named():
    tables = RunningTables(SIZE)
    tables.update([task(TaskKind.DECODE, TABLE)])
    for _ in range(3):
        assert {*tables.written()} == {*tables.read()} == set(TABLE)
        tables.pass_submitted()
    tables.hear([(0, 9)])
    assert {*tables.written()} == set(TABLE[2:])


def test_blocks_of_an_extend_task_are_named_beside_the_table():
    tables = decoding()
    extend = task(TaskKind.EXTEND, extend_block_tables=[40, 41])
    del extend.block_tables
    tables.update([extend])
    assert {*tables.written()} == {12, 40, 41}
    assert {*tables.read()} == {*TABLE, 40, 41}
    tables.clear()
    assert {*tables.written()} == {*tables.read()} == set()
