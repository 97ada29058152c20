"""What main and draft model write of a row is named before every pass, whatever is accepted, stopped or paused."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1.fastdeploy_integration.task_kind import TaskKind
from fastdeploy_kvcache_v1.fastdeploy_integration.worker.running_tables import RunningTables
from tests.fastdeploy_integration.worker.draft_rows import DraftRow

TABLE = list(range(1000, 1400))


def prefill(start, end):
    return SimpleNamespace(
        task_type=SimpleNamespace(value=int(TaskKind.PREFILL)),
        idx=0,
        block_tables=TABLE,
        prefill_start_index=start,
        prefill_end_index=end,
    )


@pytest.mark.parametrize("truncates", [True, False])
@pytest.mark.parametrize(("draft_tokens", "model_steps"), [(1, 1), (2, 1), (2, 2), (3, 2), (5, 1), (5, 3), (5, 5)])
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
            tables.update([prefill(position, end)])
            check(tables, row.chunk(position, end), block_size)
            position = end
        for _ in range(rng.randint(1, 40)):
            row.is_paused = rng.random() < 0.1
            if rng.random() < 0.3:  # the engine is some passes behind, and the last token it has is without KV
                heard = max(position, row.length - rng.randint(0, 3 * draft_tokens))
                tables.hear([(0, heard + 1)])
            before = row.length
            written = row.decode()
            check(tables, written, block_size)
            if written:
                lowest, highest = min(lowest, min(written) - before), max(highest, max(written) - before)
    assert lowest == -draft_tokens, "the draft model starts over as far behind as it can"
    assert highest == draft_tokens + model_steps - 1, "and goes as far ahead"


def check(tables, written, block_size):
    named = tables.written()
    assert {TABLE[each // block_size] for each in written} <= named
    tables.pass_submitted()
