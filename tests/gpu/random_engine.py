"""A random scheduler: batches, copies, and what every block must hold in the order of steps. It knows no GPU.

Legal, but as hostile as a scheduler may be: slots are given away in the step that frees them, blocks are evicted while
they are read, a row decodes over many passes without a word, a chunk waits, speculative tokens are written and dropped.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from fastdeploy_kvcache_v1.metadata import CacheLevel, CacheSwapMetadata, SwapStep, TransferReport

PREFILL, DECODE, PREEMPTED = 0, 1, 2
GARBAGE = -1
"""The tag of a token whose content nobody may read."""

Pairs = list[tuple[int, int]]


@dataclass
class Row:
    """One request: its block table and the tags of the tokens computed so far."""

    idx: int
    table: list[int]
    tags: list[int]
    num_shared: int
    prompt_end: int
    end: int
    chunk: int = 0
    """Tokens of the prompt that this pass computes."""


@dataclass
class Work:
    """A pass: `(slot, token, tag)` of what it writes, then of what it reads."""

    writes: list[tuple[int, int, int]] = field(default_factory=list)
    reads: list[tuple[int, int, int]] = field(default_factory=list)


class RandomEngine:
    """`device` and `host` say what each slot must hold once everything submitted has run. Not thread-safe."""

    def __init__(
        self, seed: int, *, device_slots: int, host_slots: int, block_size: int, rows: int = 3, drafts: int = 0
    ) -> None:
        """`drafts`: speculative tokens per decoding row and pass."""
        self.random = random.Random(seed)
        self.block_size, self.drafts = block_size, drafts
        self.num_rows = rows
        self.device: list[list[int]] = [[GARBAGE] * block_size for _ in range(device_slots)]
        self.host: list[list[int] | None] = [None] * host_slots
        self.host_writer: list[int] = [-1] * host_slots
        """Step of the last eviction into each host slot."""
        self.step = -1
        self._tag = itertools.count(1)
        self.reset()

    def reset(self) -> None:
        """Nothing is cached any more: tensors were dropped."""
        self.rows: dict[int, Row] = {}
        self._preempted: set[int] = set()
        """Seats that no other request gets in this batch."""
        self.users = [0] * len(self.device)
        self.cached: set[int] = set()
        """Device slots that hold a whole block and belong to no row's end."""
        self.free = list(range(len(self.device)))
        """The one freed last is the last."""
        self.arrived: list[int] = []
        """Device slots that this step's copies fill."""
        self.host = [None] * len(self.host)

    def store_arrives(self) -> list[int]:
        """A store fills some host slots with blocks of its own; returns which. Only after `reset`."""
        slots = self.random.sample(range(len(self.host)), self.random.choice([0, 3, 6]))
        for slot in slots:
            self.host[slot] = [next(self._tag) for _ in range(self.block_size)]
            self.host_writer[slot] = -1
        return slots

    # ---- a step

    def next_batch(self, *, has_pass: bool) -> tuple[list[Any], SwapStep]:
        """The tasks of the next batch and its copies. Without a pass no row begins, and no chunk is announced."""
        self.step += 1
        self._preempted.clear()
        tasks = self._end_rows()
        evict = self._evict()
        tasks += self._grow()
        swap_in = self._swap_in()
        for row in self.rows.values():
            row.chunk = 0
        if has_pass:
            self._admit()
            tasks += self._chunks()
        copies = [
            CacheSwapMetadata(source, target, *(tuple(slots) for slots in zip(*pairs, strict=True)))
            for source, target, pairs in (
                (CacheLevel.DEVICE, CacheLevel.HOST, evict),
                (CacheLevel.HOST, CacheLevel.DEVICE, swap_in),
            )
            if pairs
        ]
        if not tasks:  # copies never ride alone: some row is told its table again
            tasks = [self._task(row, DECODE) for row in self._decoding()] or [_control(PREEMPTED, self.num_rows, [])]
        return tasks, SwapStep(self.step, tuple(copies))

    def _end_rows(self) -> list[Any]:
        """Rows that finish are not announced; preempted ones are."""
        tasks = []
        for row in list(self.rows.values()):
            if len(row.tags) >= row.end or self.random.random() < 0.02:
                self._release(row)
            elif self.random.random() < 0.04:
                tasks.append(self._preempt(row))
        return tasks

    def _preempt(self, row: Row) -> Any:
        self._release(row)
        self._preempted.add(row.idx)
        return _control(PREEMPTED, row.idx, row.table)

    def _release(self, row: Row) -> None:
        del self.rows[row.idx]
        whole = len(row.tags) // self.block_size
        for place, slot in enumerate(row.table):
            self.users[slot] -= 1
            if self.users[slot] == 0 and slot not in self.cached:
                if place < whole and self.random.random() < 0.8:
                    self.cached.add(slot)
                else:
                    self.free.append(slot)

    def _whole_blocks(self) -> list[int]:
        own = {slot for row in self.rows.values() for slot in row.table[: len(row.tags) // self.block_size]}
        return sorted(self.cached | own)

    def _evict(self) -> Pairs:
        """Backups of blocks in use, and evictions that free their slot at once."""
        if self.random.random() < 0.35:
            return []
        pressed = len(self.free) < len(self.device) // 3
        idle = [slot for slot in self.arrived if slot in self.cached and not self.users[slot]]
        blocks = idle if idle and self.random.random() < 0.5 else self._whole_blocks()
        count = min(len(blocks), self.random.randint(1, 4))
        if self.random.random() < 0.4:  # neighbours go in one run
            first, target = (
                self.random.randrange(len(blocks) - count + 1),
                self.random.randrange(len(self.host) - count),
            )
            chosen, targets = blocks[first : first + count], [*range(target, target + count)]
        else:
            chosen, targets = self.random.sample(blocks, count), self.random.sample(range(len(self.host)), count)
        for slot, target in zip(chosen, targets, strict=True):
            self.host[target] = list(self.device[slot])
            self.host_writer[target] = self.step
            if slot in self.cached and not self.users[slot] and (pressed or self.random.random() < 0.5):
                self.cached.remove(slot)
                self.free.append(slot)
        return list(zip(chosen, targets, strict=True))

    def _swap_in(self) -> Pairs:
        self.arrived.clear()
        sources = [slot for slot, tags in enumerate(self.host) if tags is not None]
        if not sources or self.random.random() < 0.3:
            return []
        pairs = []
        for _ in range(min(self.random.randint(1, 4), len(self.free) - 2)):
            source, target = self.random.choice(sources), self._take()
            self.device[target] = list(self.host[source] or ())
            self.cached.add(target)
            self.arrived.append(target)
            pairs.append((source, target))
        return pairs

    def _take(self) -> int:
        """As often as not the slot that was freed last: its last use may still run."""
        return self.free.pop(-1 if self.random.random() < 0.5 else self.random.randrange(len(self.free)))

    def _grow(self) -> list[Any]:
        """Rows that decode get their next block before they need it; who finds none is preempted."""
        tasks = []
        for row in self._decoding():
            needed = -(-(len(row.tags) + 1 + self.drafts) // self.block_size) - len(row.table)
            if needed > len(self.free):
                tasks.append(self._preempt(row))
            elif needed > 0:
                ahead = self.random.choice([0, 0, 1, 2])  # it grows into these without another word
                self._extend(row, min(needed + ahead, len(self.free)))
                tasks.append(self._task(row, DECODE))
        return tasks

    def _extend(self, row: Row, count: int) -> None:
        for _ in range(count):
            slot = self._take()
            self.users[slot] += 1
            row.table.append(slot)

    def _admit(self) -> None:
        for idx in range(self.num_rows):
            if idx in self.rows or idx in self._preempted or self.random.random() < 0.5 or len(self.free) < 3:
                continue
            known = self.arrived if self.arrived and self.random.random() < 0.5 else sorted(self.cached)
            shared = self.random.sample(known, min(len(known), self.random.randint(0, 4)))
            tags = [tag for slot in shared for tag in self.device[slot]]
            for slot in shared:
                self.users[slot] += 1
            prompt = len(tags) + self.random.randint(1, 3 * self.block_size)
            end = prompt + self.random.choice([1, 2, self.block_size, 3 * self.block_size])
            self.rows[idx] = Row(idx, list(shared), tags, len(shared), prompt, end)

    def _chunks(self) -> list[Any]:
        """Parts of prompts that this pass computes; some wait for a later one."""
        tasks = []
        for row in self.rows.values():
            left = row.prompt_end - len(row.tags)
            if left <= 0 or self.random.random() < 0.2:
                continue
            chunk = min(left, self.random.choice([1, self.block_size, 2 * self.block_size]))
            needed = -(-(len(row.tags) + chunk) // self.block_size) - len(row.table)
            if needed <= len(self.free):
                self._extend(row, needed)
                row.chunk = chunk
                tasks.append(self._task(row, PREFILL))
        return tasks

    def _decoding(self) -> list[Row]:
        return [row for row in self.rows.values() if len(row.tags) >= row.prompt_end]

    def running(self) -> tuple[tuple[int, int], ...]:
        """Rows, and how many tokens of each the engine has: of those sampled by the latest passes it heard nothing yet.

        The last token of a row has no KV, and a row that computes its prompt counts as 0.
        """
        lengths = {row.idx: len(row.tags) + 1 - self.random.choice([0, 0, 1, 2, 4]) for row in self.rows.values()}
        return tuple((idx, length if length > self.rows[idx].prompt_end else 0) for idx, length in lengths.items())

    def _task(self, row: Row, kind: int) -> Any:
        start = len(row.tags)
        return SimpleNamespace(
            task_type=SimpleNamespace(value=kind),
            idx=row.idx,
            request_id=f"row {row.idx}",
            block_tables=list(row.table),
            prefill_start_index=start,
            prefill_end_index=start + row.chunk,
            prompt_token_ids=[0] * row.prompt_end,
            output_token_ids=[0] * max(0, start - row.prompt_end),
            need_prefill_tokens=row.prompt_end,
            num_cached_tokens=row.num_shared * self.block_size,
        )

    # ---- a pass

    def decode_on(self) -> Work:
        """As `compute`, of a pass without a batch before it: rows go on as far as their tables reach."""
        for row in self.rows.values():
            row.chunk = 0
        return self.compute()

    def compute(self) -> Work:
        """What the pass of this step writes and reads; afterwards its tokens count as computed."""
        work = Work()
        for row in self.rows.values():
            count = row.chunk
            if not count and len(row.tags) >= row.prompt_end:
                count = min(1 + self.drafts, len(row.table) * self.block_size - len(row.tags))
            if not count:
                continue
            accepted = count if row.chunk else self.random.randint(1, count)
            old = len(row.tags)
            fresh = [next(self._tag) for _ in range(count)]
            for place, tag in enumerate(fresh, old):
                slot, token = row.table[place // self.block_size], place % self.block_size
                work.writes.append((slot, token, tag))
                self.device[slot][token] = tag
            row.tags += fresh[:accepted]
            for place, tag in enumerate(row.tags[:old]):
                work.reads.append((row.table[place // self.block_size], place % self.block_size, tag))
        return work

    # ---- what the worker tells

    def hear(self, report: TransferReport) -> None:
        """Host slots whose copy failed hold nothing."""
        for result in report.transfers:
            for slot in result.target_slots if result.target is CacheLevel.HOST else ():
                if self.host_writer[slot] == result.step:
                    self.host[slot] = None


def _control(kind: int, idx: int, table: list[int]) -> Any:
    return SimpleNamespace(task_type=SimpleNamespace(value=kind), idx=idx, request_id=f"row {idx}", block_tables=table)
