"""A FAKE worker: instead of a model it keeps, for every token position of every block, the prefix that was computed
there. So it notices at once when a request reads a block that holds something else. Takes FastDeploy's task objects.
"""

import pickle

from fastdeploy_kvcache_v1.fastdeploy_integration.transport import SwapInbox
from fastdeploy_kvcache_v1.metadata import EVICT, TransferResult

PREFILL, DECODE, PREEMPTED, EXTEND, ABORT = range(5)
VOCABULARY = 7

GARBAGE = {0: "garbage"}
"""What no computation leaves in a block."""


class Row:
    def __init__(self, request_id, tokens, table):
        self.request_id = request_id
        self.tokens = tokens
        self.table = table
        self.computed = 0
        self.waits_for_chunk = False


class FakeWorker:
    def __init__(self, block_size):
        self.block_size = block_size
        self.device, self.host, self.rows = {}, {}, {}
        self.inbox = SwapInbox()
        self.fails = lambda: False
        """Asked before each eviction."""
        self.failed = []
        self.last_step = -1
        self.weights = "weights 0"
        self.num_swapped_in = self.num_swapped_out = self.num_prefilled = 0

    def receive(self, tasks):
        """One batch, pickled as on FastDeploy's queue. Returns ids of (preempted, aborted) requests."""
        tasks = pickle.loads(pickle.dumps(list(tasks)))
        for step in self.inbox.take(tasks):
            self.last_step = step.step
            for copies in step.transfers:
                if copies.kind == EVICT:
                    self._evict(step.step, copies)
                else:
                    self._swap_in(copies)
            self.num_swapped_out += len(step.evict)
            self.num_swapped_in += len(step.swap_in)
        preempted, aborted = [], []
        for task in tasks:
            kind = task.task_type.value
            if kind == PREFILL:
                self._prefill(task)
            elif kind == DECODE:
                if task.idx in self.rows:  # else it ended while the batch was on its way
                    self.rows[task.idx].table = list(task.block_tables)
            elif kind in (PREEMPTED, ABORT):
                self.rows.pop(task.idx, None)
                (preempted if kind == PREEMPTED else aborted).append(task.request_id)
        return preempted, aborted

    def _evict(self, step, copies):
        # A slot that was never computed (its batch was dropped) holds nothing that anybody may read.
        content = [dict(self.device.get(slot, {})) for slot in copies.source_slots]
        if self.fails():  # the host slots hold neither what they held nor what they should
            content = [GARBAGE] * len(content)
            self.failed.append(TransferResult(step, *copies.kind, len(copies), 0, 0.0, copies.target_slots, "injected"))
        self._reach_host(step, dict(zip(copies.target_slots, content, strict=True)))

    def _reach_host(self, step, content):
        self.host.update(content)

    def _swap_in(self, copies):
        copied = [dict(self.host.get(slot, {})) for slot in copies.source_slots]
        self.device.update(zip(copies.target_slots, copied, strict=True))

    def _prefill(self, task):
        tokens = [*task.prompt_token_ids, *task.output_token_ids]
        row = self.rows.get(task.idx)
        if row is None or row.request_id != task.request_id or task.prefill_start_index < row.computed:
            row = self.rows[task.idx] = Row(task.request_id, tokens, [])
        row.table = list(task.block_tables)
        row.computed = task.prefill_start_index
        row.waits_for_chunk = task.prefill_end_index < len(tokens)
        self._compute(row, task.prefill_end_index)
        self.num_prefilled += task.prefill_end_index - task.prefill_start_index

    def step(self):
        """One token for every complete row whose next position has a block. Returns {request id: token}."""
        sampled = {}
        for row in self.rows.values():
            if row.waits_for_chunk:
                continue
            if row.computed == len(row.tokens) - 1 and self._has_block(row):
                self._compute(row, len(row.tokens))
            if row.computed == len(row.tokens):
                token = hash(tuple(row.tokens)) % VOCABULARY + 1
                row.tokens.append(token)
                sampled[row.request_id] = token
        return sampled

    def stop(self, request_id):
        """The worker itself stops rows that are finished."""
        self.rows = {idx: row for idx, row in self.rows.items() if row.request_id != request_id}

    def _has_block(self, row):
        return row.computed // self.block_size < len(row.table)

    def _compute(self, row, end):
        for position in range(row.computed):
            block = self.device.get(row.table[position // self.block_size], {})
            found, expected = block.get(position % self.block_size), self._kv(row.tokens[: position + 1])
            assert found == expected, f"{row.request_id}: position {position} holds the KV of {found}, not {expected}"
        for position in range(row.computed, end):
            slot = row.table[position // self.block_size]
            if position % self.block_size == 0:
                self.device[slot] = {}
            self.device[slot][position % self.block_size] = self._kv(row.tokens[: position + 1])
        row.computed = end

    def _kv(self, tokens):
        return (self.weights, *tokens)
