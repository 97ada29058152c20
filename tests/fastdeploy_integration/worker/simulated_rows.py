"""A FAKE device and engine that treat rows as FastDeploy's do: what each pass really reads and writes, position by
position.

The rules are those of FastDeploy's kernels: a row rests between chunks, decodes after the last one, pauses when a block
is missing and goes on when it came, stops by itself at its last token; the engine hears of tokens passes later, and
gives the blocks of a row away as soon as it has heard its last token.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

from fastdeploy_kvcache_v1.fastdeploy_integration.task_kind import TaskKind


class Request:
    """What the engine knows."""

    def __init__(self, prompt, max_tokens):
        self.prompt, self.max_tokens = prompt, max_tokens
        self.received = 0
        """Tokens that the engine got."""
        self.need_prefill, self.computed = prompt, 0
        self.table = []

    @property
    def total(self):
        return self.prompt + self.received

    @property
    def decodes(self):
        return self.total > self.need_prefill


class Row:
    """What the device knows."""

    def __init__(self, request, start, end, table):
        self.request, self.table = request, list(table)
        self.chunk = (start, end)
        self.length = 0
        """Tokens with KV, once it decodes."""
        self.is_paused = self.has_stopped = False
        self.sampled = request.received


class SimulatedRows:
    def __init__(self, seed, *, block_size=4, draft_tokens=0, num_slots=120, num_rows=5):
        self.rng = random.Random(seed)
        self.size, self.draft, self.num_rows = block_size, draft_tokens, num_rows
        self.free = list(range(num_slots))
        self.requests: dict[int, Request] = {}
        self.rows: dict[int, Row] = {}
        self.news: list[tuple[int, Request, int]] = []
        """(pass in which the engine hears, request, tokens)."""
        self.num_passes = self.num_paused = self.num_decoded = self.num_finished = 0

    # ---- engine

    def _allocate(self, count):
        self.rng.shuffle(self.free)
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def _task(self, kind, index, **fields):
        return SimpleNamespace(task_type=SimpleNamespace(value=int(kind)), idx=index, **fields)

    def schedule(self):
        """A batch, and what its message says of running rows."""
        batch = []
        for index, request in list(self.requests.items()):
            if request.computed < request.need_prefill:
                if self.rng.random() < 0.7:
                    self._prefill(index, request, batch)
            elif request.decodes and self.rng.random() < 0.03:
                self._preempt(index, request, batch)
            else:
                self._grow(index, request, batch)
        if len(self.requests) < self.num_rows and self.rng.random() < 0.4:
            index = self.rng.choice([each for each in range(self.num_rows) if each not in self.requests])
            self.requests[index] = request = Request(self.rng.randint(1, 40), self.rng.randint(1, 40))
            self._prefill(index, request, batch)
        lengths = [(i, each.total if each.decodes else 0) for i, each in self.requests.items()]
        return batch, lengths

    def _prefill(self, index, request, batch):
        end = min(request.need_prefill, request.computed + self.rng.randint(1, 30))
        blocks = -(-end // self.size) + (1 if self.draft else 0) - len(request.table)
        if blocks > len(self.free):
            return
        request.table += self._allocate(max(0, blocks))
        task = self._task(
            TaskKind.PREFILL,
            index,
            block_tables=list(request.table),
            prefill_start_index=request.computed,
            prefill_end_index=end,
            request=request,
        )
        request.computed = end
        batch.append(task)

    def _grow(self, index, request, batch):
        room = len(request.table) * self.size - request.total
        if room <= self.rng.randint(-1, 9) + 2 * self.draft and len(self.free) >= 2:
            request.table += self._allocate(self.rng.randint(1, 2))
            batch.append(self._task(TaskKind.DECODE, index, block_tables=list(request.table)))

    def _preempt(self, index, request, batch):
        self.free += request.table
        batch.append(self._task(self.rng.choice([TaskKind.PREEMPTED, TaskKind.ABORT]), index))
        del self.requests[index]

    def hear(self):
        """The engine gets the tokens that have arrived by now."""
        for due, request, tokens in list(self.news):
            if due <= self.num_passes:
                self.news.remove((due, request, tokens))
                request.received += tokens
                index = next((i for i, each in self.requests.items() if each is request), None)
                if request.received >= request.max_tokens and index is not None:
                    self.free += request.table
                    self.num_finished += 1
                    del self.requests[index]

    # ---- device

    def insert(self, batch):
        for task in batch:
            kind = task.task_type.value
            if kind == TaskKind.PREFILL:
                self.rows[task.idx] = Row(
                    task.request, task.prefill_start_index, task.prefill_end_index, task.block_tables
                )
            elif kind == TaskKind.DECODE:
                if task.idx in self.rows:
                    self.rows[task.idx].table = list(task.block_tables)
            else:
                self.rows.pop(task.idx, None)

    def run_pass(self):
        """Returns the slots that the pass reads, and those that it writes, by row."""
        reads, writes = {}, {}
        for index, row in self.rows.items():
            touched = self._run_row(row)
            if touched is not None:
                first, end = touched
                blocks = row.table[max(0, first) // self.size : -(-end // self.size)]
                writes[index] = set(blocks)
                reads[index] = set(row.table[: -(-end // self.size)])
        self.num_passes += 1
        return reads, writes

    def _run_row(self, row):
        """The positions that it writes, None for none."""
        if row.has_stopped:
            return None
        if row.chunk is not None:
            (start, end), row.chunk = row.chunk, None
            if end < row.request.need_prefill:
                row.has_stopped = True  # until its next chunk
                return start, end
            row.length = end
            self._sampled(row, 1)
            self._pause_without_block(row)
            return start, end + self.rng.randint(0, self.draft)  # the draft model goes on from the prompt
        if row.is_paused:
            row.is_paused = not self._has_block(row)
            if row.is_paused:
                return None
        self.num_decoded += 1
        drafted = self.rng.randint(0, self.draft)
        accepted = self.rng.randint(1, drafted + 1)
        before = row.length
        row.length += accepted
        self._sampled(row, accepted)
        self._pause_without_block(row)
        if not self.draft:
            return before, before + 1
        # The draft model may start over at what the pass before verified, and goes on from what is accepted now.
        back = self.rng.randint(0, self.draft + 1)
        return before - back, max(before + drafted + 1, row.length + self.draft)

    def _sampled(self, row, tokens):
        tokens = min(tokens, row.request.max_tokens - row.sampled)
        row.sampled += tokens
        row.has_stopped = row.sampled >= row.request.max_tokens
        self.news.append((self.num_passes + self.rng.randint(1, 3), row.request, tokens))
        self.news.sort(key=lambda each: each[0])

    def _has_block(self, row):
        ahead = 2 * self.draft + 2 if self.draft else 0
        return (row.length + ahead) // self.size < len(row.table)

    def _pause_without_block(self, row):
        row.is_paused = not row.has_stopped and not self._has_block(row)
        self.num_paused += row.is_paused
