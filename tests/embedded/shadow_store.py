"""A store without bytes: its values are the tokens that the shadow worker keeps in host slots.

It answers when the test says so, fails as the test says, and goes on writing after a failure, as real ones do.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from copy import copy
from typing import Any

from fastdeploy_kvcache_v1.metadata import BlockHash
from fastdeploy_kvcache_v1.storage.engine.link import Answer
from fastdeploy_kvcache_v1.storage.messages import (
    LoadBlocks,
    LoadDone,
    QueryDone,
    StoreBlocks,
    StoreDone,
    UseNamespace,
)

Value = Any


class ShadowStore:
    """A `Link`. Commands of a kind are answered in order, those of different kinds in any."""

    def __init__(self, worker: Any, rng: random.Random | None = None, num_ranks: int = 1, garbage: Value = ()) -> None:
        """`worker.host`: what each host slot holds. `garbage`: what no computation ever writes there."""
        self._worker = worker
        self._garbage = garbage
        self._rng = rng or random.Random(0)
        self.num_ranks = num_ranks
        self.values: dict[tuple[str, BlockHash], Value] = {}
        self.namespace = ""
        self.queries: deque[tuple[str, Sequence[BlockHash]]] = deque()
        self.loads: deque[tuple[str, LoadBlocks]] = deque()
        self.stores: deque[tuple[str, StoreBlocks]] = deque()
        self.committed: list[BlockHash] = []
        self.touched: list[list[BlockHash]] = []
        self.failure_rate = 0.0
        self.seconds_per_block = 0.0
        """That a load says it took; 0 says nothing."""
        self.question_s = 0.0
        """That an answer to a question says it took."""

    # ---- Link

    def query(self, query_id: str, hashes: Sequence[BlockHash]) -> None:
        self.queries.append((query_id, list(hashes)))

    def send(self, command: UseNamespace | LoadBlocks | StoreBlocks) -> None:
        if isinstance(command, UseNamespace):
            self.namespace = command.namespace.digest
        elif isinstance(command, LoadBlocks):
            self.loads.append((self.namespace, command))
        else:
            self.stores.append((self.namespace, command))

    def commit(self, hashes: Sequence[BlockHash]) -> None:
        self.committed += hashes

    def touch(self, hashes: Sequence[BlockHash]) -> None:
        self.touched.append(list(hashes))

    # ---- the test's end

    @property
    def is_idle(self) -> bool:
        return not (self.queries or self.loads or self.stores)

    def answer(self) -> list[Answer]:
        """Of one command, all ranks."""
        kinds = [queue for queue in (self.queries, self.loads, self.stores) if queue]
        chosen = self._rng.choice(kinds)
        fails = self._rng.random() < self.failure_rate
        if chosen is self.queries:
            return [self.answer_query(fails)]
        if chosen is self.loads:
            return self._answer_load(fails)
        return self._answer_store(fails)

    def answer_query(self, fails: bool = False) -> Answer:
        """Of the oldest question."""
        query_id, hashes = self.queries.popleft()
        if fails:
            return QueryDone(query_id, 0, error="no route to host")
        return QueryDone(query_id, self._num_stored(self.namespace, hashes), self.question_s)

    def _answer_load(self, fails: bool) -> list[Answer]:
        namespace, command = self.loads.popleft()
        arrived = self._num_stored(namespace, command.hashes)
        if fails:
            arrived = self._rng.randrange(arrived + 1)
        for block, slot in zip(command.hashes[:arrived], command.slots, strict=False):
            self._worker.host[slot] = copy(self.values[namespace, block])
        for slot in command.slots[arrived:]:
            self._worker.host[slot] = self._garbage  # bytes of a transfer that went wrong
        error = "connection reset" if fails and self._rng.random() < 0.5 else None
        counts = [arrived] + [self._rng.randint(arrived, len(command.slots)) for _ in range(self.num_ranks - 1)]
        took_s = arrived * self.seconds_per_block
        return [LoadDone(command.load_id, rank, count, False, 0, took_s, error) for rank, count in enumerate(counts)]

    def _answer_store(self, fails: bool) -> list[Answer]:
        namespace, command = self.stores.popleft()
        error = "disk full" if fails else None
        if not fails:
            for block, slot in zip(command.hashes, command.slots, strict=True):
                value = copy(self._worker.host[slot])
                known = self.values.setdefault((namespace, block), value)
                assert known == value, "the same block was stored with other bytes"
        return [StoreDone(command.store_id, rank, len(command.slots), error=error) for rank in range(self.num_ranks)]

    def _num_stored(self, namespace: str, hashes: Sequence[BlockHash]) -> int:
        number = 0
        while number < len(hashes) and (namespace, hashes[number]) in self.values:
            number += 1
        return number
