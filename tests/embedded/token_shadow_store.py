"""A store without bytes that names blocks by token ids: its values are the tokens in the shadow worker's device slots.

It answers when the test says so, fails as the test says, and goes on reading and writing after a failure.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

from fastdeploy_kvcache_v1.storage.attention_store.tasks import (
    FlushDone,
    MatchTask,
    ReadStorageTask,
    WriteDone,
    WriteStorageTask,
)
from fastdeploy_kvcache_v1.storage.engine.link import Answer
from fastdeploy_kvcache_v1.storage.messages import LoadDone, QueryDone, UseNamespace
from tests.embedded.shadow import ShadowWorker

LATE_S = 5.0
"""How long a call that failed goes on."""

Path = tuple[str, tuple[int, ...]]
Value = list["int | None"]


class TokenShadowStore:
    """A `Link`. Tasks of a kind are answered in order, those of different kinds in any."""

    def __init__(self, worker: ShadowWorker, block_size: int, clock: Callable[[], float], rng: random.Random) -> None:
        self.num_ranks = 1
        self.values: dict[Path, Value] = {}
        self.namespace = ""
        self.failure_rate = 0.0
        self.matches: deque[tuple[str, MatchTask]] = deque()
        self.reads: deque[tuple[str, ReadStorageTask]] = deque()
        self.writes: deque[tuple[str, WriteStorageTask]] = deque()
        self.flushes: deque[WriteStorageTask] = deque()
        self.flushed: list[WriteStorageTask] = []
        """That the index took, in order."""
        self.late_reads: list[tuple[float, tuple[int, ...]]] = []
        """Until when slots may be written."""
        self.late_writes: list[tuple[float, tuple[int, ...], list[Value]]] = []
        """Until when slots are read, and what must be in them."""
        self._worker = worker
        self._size = block_size
        self._clock = clock
        self._rng = rng

    # ---- Link

    def query(self, query_id, hashes):
        raise AssertionError("hashes mean nothing to this store")

    commit = touch = query

    def send(self, command: object) -> None:
        if isinstance(command, UseNamespace):
            self.namespace = command.namespace.digest
            return
        assert isinstance(command, MatchTask | ReadStorageTask | WriteStorageTask)
        assert len(command.token_ids) % self._size == 0
        if isinstance(command, MatchTask):
            self.matches.append((self.namespace, command))
        elif isinstance(command, ReadStorageTask):
            self.reads.append((self.namespace, command))
        elif command.flush_cache_exists is None:
            self.writes.append((self.namespace, command))
        else:
            self.flushes.append(command)

    # ---- the test's end

    @property
    def is_idle(self) -> bool:
        return not (self.matches or self.reads or self.writes or self.flushes)

    def look(self) -> None:
        """What calls that failed still do."""
        now = self._clock()
        self.late_reads = [late for late in self.late_reads if late[0] > now]
        self.late_writes = [late for late in self.late_writes if late[0] > now]
        for _, slots in self.late_reads:
            for slot in slots:
                self._fill(slot, None)
        for _, slots, values in self.late_writes:
            assert [self._content(slot) for slot in slots] == values, "what is being read was overwritten"

    def answer(self) -> Answer:
        """Of one task."""
        kinds = [queue for queue in (self.matches, self.reads, self.writes, self.flushes) if queue]
        chosen = self._rng.choice(kinds)
        fails = self._rng.random() < self.failure_rate
        if chosen is self.matches:
            return self.answer_match(fails)
        if chosen is self.reads:
            return self.answer_read(fails)
        return self.answer_write(fails) if chosen is self.writes else self.answer_flush(fails)

    def answer_match(self, fails: bool = False) -> Answer:
        namespace, task = self.matches.popleft()
        if fails:
            return QueryDone(task.task_id, 0, error="no route to host")
        number = len(self._stored(namespace, task.token_ids))
        return QueryDone(task.task_id, max(0, number - task.first_block_idx))

    def answer_read(self, fails: bool = False) -> Answer:
        namespace, task = self.reads.popleft()
        stored = self._stored(namespace, task.token_ids)[task.start_read_block_idx :]
        if fails:
            stored = stored[: self._rng.randrange(len(stored) + 1)]
        for slot in task.gpu_block_ids:
            self._fill(slot, None)  # whatever a read leaves where nothing arrives
        for slot, value in zip(task.gpu_block_ids, stored, strict=False):
            self._fill(slot, value)
        if fails and self._rng.random() < 0.7:
            self.late_reads.append((self._clock() + LATE_S, task.gpu_block_ids))
            return LoadDone(task.task_id, 0, 0, error="connection reset", quiet_after_s=LATE_S)
        return LoadDone(task.task_id, 0, min(len(stored), len(task.gpu_block_ids)))

    def answer_write(self, fails: bool = False) -> Answer:
        namespace, task = self.writes.popleft()
        if fails:
            values = [self._content(slot) for slot in task.gpu_block_ids]
            self.late_writes.append((self._clock() + LATE_S, task.gpu_block_ids, values))
            return WriteDone(task.task_id, 0, 0, error="disk full", quiet_after_s=LATE_S)
        num_written = 0
        for index, slot in enumerate(task.gpu_block_ids, task.start_write_block_idx):
            path, value = self._path(namespace, task.token_ids, index), self._content(slot)
            self._check(path, value)
            num_written += path not in self.values
            self.values[path] = value
        return WriteDone(task.task_id, 0, num_written, num_stored=len(task.gpu_block_ids))

    def answer_flush(self, fails: bool = False) -> Answer:
        task = self.flushes.popleft()
        if fails:
            return FlushDone(task.task_id, 0, 0, error="no route to host")
        self.flushed.append(task)
        return FlushDone(task.task_id, 0, 0)

    # ---- the worker's memory

    def _content(self, slot: int) -> Value:
        return list(self._worker.device[slot])

    def _fill(self, slot: int, value: Value | None) -> None:
        """None: with garbage."""
        self._worker.device[slot] = [-1] * self._size if value is None else list(value)

    def _check(self, path: Path, value: Value) -> None:
        assert value == list(path[1][-self._size :]), "what is stored are the tokens of the block"

    def _stored(self, namespace: str, token_ids: tuple[int, ...]) -> list[Value]:
        found: list[Value] = []
        while (path := self._path(namespace, token_ids, len(found))) in self.values:
            if len(path[1]) < self._size * (len(found) + 1):
                break
            found.append(self.values[path])
        return found

    def _path(self, namespace: str, token_ids: tuple[int, ...], index: int) -> Path:
        return namespace, token_ids[: (index + 1) * self._size]
