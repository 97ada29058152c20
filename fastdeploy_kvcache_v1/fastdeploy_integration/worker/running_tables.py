"""RunningTables: the device slots that the next forward pass reads, and those that it may write.

The length of a decoding row is on the device. The host knows two bounds. Lower bound: the tokens that the engine has
received, which every batch carries, and the chunks that passes have computed. Upper bound: a pass adds at most one
token and the draft tokens to a row. Why both are safe: docs/develop/decisions.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from ...worker.slot_set import NO_SLOTS, SlotSet, slot_set
from ..transport import RunningRow, TaskKind

Numbers = npt.NDArray[np.int64]

_UNKNOWN_LENGTH = 1 << 40
"""Tokens: longer than any block table."""

_ENDED = -1
"""In place of a length: the engine no longer names the row."""

_LOW, _STOP, _PER_PASS, _BLOCKS = range(4)
"""Rows of `RunningTables._numbers`. Positions are tokens from the start of the sequence.

The next pass writes in `[low, stop)`. Each pass moves `stop` by `per_pass`, which is 0 until the row's chunk is
computed. `blocks`: length of the row's block table.
"""


class _Row:
    """The block table of one row of the batch."""

    __slots__ = ("slots", "table")

    def __init__(self, table: list[int]) -> None:
        self.table = table
        self.slots = slot_set(table)

    def take(self, table: list[int]) -> int:
        """Replace the table. Returns the length of the old table if the new one starts with it, else 0."""
        known = len(self.table)
        if table[:known] != self.table:
            known = 0
        more = slot_set(table[known:])
        self.slots = self.slots | more if known else more
        self.table = table
        return known


class RunningTables:
    """Block tables and lengths of the rows of the running batch. Not thread-safe.

    `draft_tokens`: tokens that a pass may write beyond the certain one; 0 without speculative decoding.
    Arrays hold what every pass needs, so that its cost does not grow with the rows.
    """

    def __init__(self, block_size: int, draft_tokens: int = 0) -> None:
        self._block_size = block_size
        self._tokens_per_pass = 1 + draft_tokens
        # Verification writes the draft tokens, and the draft model continues from the last accepted one: FastDeploy
        # allocates 2 * draft_tokens + 2 tokens ahead. Its draft model restarts at the tokens that the previous pass
        # verified.
        self._reach = 2 * draft_tokens + 3 if draft_tokens else 1
        self._reach_back = self._tokens_per_pass if draft_tokens else 0
        self._rows: dict[int, _Row] = {}
        self._extended: dict[int, SlotSet] = {}
        """By row: slots of its extend tasks."""
        self._numbers: Numbers = np.zeros((4, 0), np.int64)
        """int64 [4, rows]: see `_LOW`."""
        self._chunks: dict[int, tuple[int, int]] = {}
        """By row whose chunk the next pass computes: bounds of its next write position after that pass."""
        self._tables: Numbers = np.zeros((0, 0), np.int64)
        """int64 [rows, blocks]: slots. Entries behind the end of a row's table are undefined."""
        self._read: SlotSet | None = NO_SLOTS
        self._written: SlotSet | None = None
        """Results of `read` and `written`; None: compute anew."""

    def update(self, tasks: Iterable[Any]) -> None:
        """Apply the tasks of a batch. O(blocks of its tasks)."""
        self._written = None
        for task in tasks:
            kind = task.task_type.value
            if kind == TaskKind.DECODE:  # the most frequent kind: the row only gains blocks
                row = self._row(task.idx)
                known = row.take(list(map(int, task.block_tables)))
                self._keep(task.idx, row.table, known)
                self._read = self._read | row.slots if known and self._read is not None else None
                continue
            self._read = None
            if kind == TaskKind.PREFILL:
                table = list(map(int, task.block_tables))
                start, end = task.prefill_start_index, task.prefill_end_index
                self._begin(task.idx, table, start=start, end=end, low=end)
            elif kind == TaskKind.EXTEND:
                self._row(task.idx)
                more = slot_set(map(int, task.extend_block_tables))
                self._extended[task.idx] = self._extended.get(task.idx, NO_SLOTS) | more
            else:
                self._chunks.pop(task.idx, None)
                self._forget(task.idx)

    def _row(self, index: int) -> _Row:
        """A row that was never announced has unknown bounds: only its table limits it."""
        if index not in self._rows:
            self._begin(index, [], start=0, end=_UNKNOWN_LENGTH, low=0)
        return self._rows[index]

    def _begin(self, index: int, table: list[int], *, start: int, end: int, low: int) -> None:
        """The next pass computes tokens `[start, end)`. No later pass writes before `low`."""
        self._forget(index)
        self._rows[index] = _Row(table)
        self._keep(index, table, 0)
        self._chunks[index] = low, end
        self._numbers[:_BLOCKS, index] = max(0, start - self._reach_back), end - 1 + self._reach, 0

    def _forget(self, index: int) -> None:
        self._rows.pop(index, None)
        self._extended.pop(index, None)

    def _keep(self, index: int, table: list[int], known: int) -> None:
        """Copy a table to the arrays, which hold its first `known` blocks already."""
        num_rows, num_blocks = self._tables.shape
        if index >= num_rows or len(table) > num_blocks:
            more_rows = max(0, 2 * (index + 1) - num_rows) if index >= num_rows else 0
            more_blocks = max(0, 2 * len(table) - num_blocks) if len(table) > num_blocks else 0
            self._numbers = np.pad(self._numbers, ((0, 0), (0, more_rows)))
            self._tables = np.pad(self._tables, ((0, more_rows), (0, more_blocks)))
        self._tables[index, known : len(table)] = table[known:]
        self._numbers[_BLOCKS, index] = len(table)

    def hear(self, running: Iterable[RunningRow]) -> None:
        """Apply the engine's knowledge of its rows at the time it sent the latest batch. A row that is missing has
        ended on the device, and its slots may belong to another row. This knowledge is older than that
        batch's chunks.
        """
        self._written = None
        rows = self._indices()
        settled = rows[self._numbers[_PER_PASS, rows] > 0]
        lengths = dict(running)
        heard = np.array([lengths.get(index, _ENDED) for index in settled.tolist()], np.int64)
        low, stop = self._numbers[:_PER_PASS, settled]
        highest = stop - self._reach  # at which the next pass may start to write
        self._numbers[_LOW, settled] = np.maximum(low, np.minimum(heard - 1, highest) - self._reach_back)
        for index in settled[heard == _ENDED].tolist():
            self._forget(index)
            self._read = None

    def pass_submitted(self) -> None:
        self._written = None
        self._numbers[_STOP] += self._numbers[_PER_PASS]
        for index, (low, end) in self._chunks.items():
            known = max(0, low - self._reach_back), end + self._reach, self._tokens_per_pass
            self._numbers[:_BLOCKS, index] = known
        self._chunks.clear()

    def _indices(self) -> Numbers:
        return np.fromiter(self._rows, np.int64, len(self._rows))

    def written(self) -> SlotSet:
        """Slots that the next pass may write. O(rows + blocks between the bounds of each row)."""
        if self._written is None:
            rows = self._indices()
            low, stop, _, num_blocks = self._numbers.take(rows, axis=1)
            first = low // self._block_size
            counts = np.maximum(np.minimum(-(-stop // self._block_size), num_blocks) - first, 0)
            slots = slot_set(self._tables[np.repeat(rows, counts), ranges(first, counts)])
            self._written = slots.union(*self._extended.values())
        return self._written

    def read(self) -> SlotSet:
        """Slots that the next pass may read or write: the rows' whole tables."""
        if self._read is None:
            self._read = NO_SLOTS.union(*(row.slots for row in self._rows.values()), *self._extended.values())
        return self._read

    def clear(self) -> None:
        self._rows.clear()
        self._extended.clear()
        self._chunks.clear()
        self._read, self._written = NO_SLOTS, None


def ranges(firsts: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Concatenated ranges `[firsts[i], firsts[i] + counts[i])`, int64."""
    ends = np.cumsum(counts)
    return np.repeat(firsts - ends + counts, counts) + np.arange(ends[-1] if len(ends) else 0)
