"""RunningTables: which device slots the next forward pass reads, and which it may write.

The length of a row that decodes lives on the device. The host knows what bounds it. From below: a row is not shorter
than what the engine has received of it, which rides on every batch, nor than its chunks that passes have computed.
From above: a pass adds at most one token and the draft tokens to a row. docs/decisions.md says why both are safe.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...worker.slot_set import SlotSet, bitmap
from ..task_kind import TaskKind
from ..transport import RunningRow

_UNKNOWN_LENGTH = 1 << 40
"""Longer than any table."""


class _Row:
    """One row of the batch. Positions are tokens from the start of the sequence."""

    __slots__ = ("chunk_pass", "end", "extended", "low", "slots", "start", "table")

    def __init__(self, table: list[int], start: int, end: int, chunk_pass: int) -> None:
        self.table = table
        self.slots = bitmap(table)
        self.start = start
        self.end = end
        """Its chunk is `[start, end)`."""
        self.chunk_pass = chunk_pass
        """Number of the pass that computes the chunk; the row decodes after it, or rests."""
        self.low = end
        """After the chunk: no pass writes before this position any more."""
        self.extended = 0
        """Slots of an extend task, as a bitmap."""

    def take(self, table: list[int]) -> bool:
        """FastDeploy gives a longer table whole; what it keeps of the old one is not looked at again. False when it
        keeps nothing of it."""
        known = len(self.table)
        is_longer = table[:known] == self.table
        self.slots = self.slots | bitmap(table[known:]) if is_longer else bitmap(table)
        self.table = table
        return is_longer


class RunningTables:
    """Block tables and lengths of the rows of the running batch. Not thread-safe.

    `draft_tokens`: how many tokens a pass may write beyond the one it is sure of; 0 without speculative decoding.
    """

    def __init__(self, block_size: int, draft_tokens: int = 0) -> None:
        self._block_size = block_size
        self._tokens_per_pass = 1 + draft_tokens
        # Verification writes the draft tokens, and the draft model goes on from the last accepted one. FastDeploy wants
        # a block for 2 * draft_tokens + 2 tokens ahead before it runs a row. It starts its draft model over at what the
        # pass before verified.
        self._reach = 2 * draft_tokens + 3 if draft_tokens else 1
        self._reach_back = self._tokens_per_pass if draft_tokens else 0
        self._rows: dict[int, _Row] = {}
        self._num_passes = 0
        self._read: int | None = 0
        self._written: SlotSet | None = None
        """What `read` and `written` say until something changes; None when it has to be found out."""

    def update(self, tasks: Iterable[Any]) -> None:
        """Take over what a batch says. O(blocks of its tasks)."""
        self._written = None
        for task in tasks:
            kind = task.task_type.value
            if kind == TaskKind.DECODE:  # the most frequent one: a row that goes on reads more than before
                row = self._row(task.idx)
                if row.take([int(slot) for slot in task.block_tables]) and self._read is not None:
                    self._read |= row.slots
                else:
                    self._read = None
                continue
            self._read = None
            if kind == TaskKind.PREFILL:
                table = [int(slot) for slot in task.block_tables]
                self._rows[task.idx] = _Row(table, task.prefill_start_index, task.prefill_end_index, self._num_passes)
            elif kind == TaskKind.EXTEND:
                self._row(task.idx).extended |= bitmap([int(slot) for slot in task.extend_block_tables])
            else:
                self._rows.pop(task.idx, None)

    def _row(self, index: int) -> _Row:
        """Of one that was never announced nothing is known but its table."""
        row = self._rows.get(index)
        if row is None:
            row = self._rows[index] = _Row([], 0, _UNKNOWN_LENGTH, self._num_passes)
            row.low = 0
        return row

    def hear(self, running: Iterable[RunningRow]) -> None:
        """What the engine knew of its rows when it sent the batch that was just taken: a row that is missing has ended
        on the device, because the engine heard so, and its slots may be anybody's.

        What it says is older than a chunk that this very batch brought.
        """
        self._written = None
        lengths = dict(running)
        settled = {index: row for index, row in self._rows.items() if self._num_passes > row.chunk_pass}
        for index, row in settled.items():
            if index in lengths:
                row.low = max(row.low, min(lengths[index] - 1, self._high(row)))
            else:
                del self._rows[index]
                self._read = None

    def pass_submitted(self) -> None:
        """A pass is on the compute stream."""
        self._num_passes += 1
        self._written = None

    def _high(self, row: _Row) -> int:
        """The highest position at which the next pass may start to write a row whose chunk has run."""
        return row.end + (self._num_passes - row.chunk_pass - 1) * self._tokens_per_pass

    def written(self) -> SlotSet:
        """Slots that the next pass may write. O(rows, and blocks between what is known of a row's length)."""
        if self._written is None:
            size, back, slots, extended = self._block_size, self._reach_back, list[int](), 0
            for row in self._rows.values():
                if self._num_passes == row.chunk_pass:
                    first, end = row.start, row.end + self._reach - 1
                else:
                    first, end = row.low, self._high(row) + self._reach
                slots += row.table[(first - back if first > back else 0) // size : -(-end // size)]
                if row.extended:
                    extended |= row.extended
            self._written = SlotSet(bitmap(slots) | extended)
        return self._written

    def read(self) -> SlotSet:
        """Slots that the next pass may read or write: all of the rows' tables."""
        if self._read is None:
            self._read = 0
            for row in self._rows.values():
                self._read |= row.slots | row.extended
        return SlotSet(self._read)

    def clear(self) -> None:
        self._rows.clear()
        self._read, self._written = 0, None
