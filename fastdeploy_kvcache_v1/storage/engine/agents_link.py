"""AgentsLink: a `StoreLink` over the storage agents of all ranks, until hosts have a `StoreProcess`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ...contract.messages import BlockHash
from ..messages import (
    CommitDone,
    LoadBlocks,
    LoadDone,
    QueryDone,
    RankDone,
    StoreBlocks,
    StoreDone,
    TouchDone,
    UseNamespace,
)
from ..namespace import Namespace
from .link import StorageLink
from .store_link import Answer

__all__ = ["AgentsLink"]


class AgentsLink:
    """Merges the answers of the ranks, and marks what all of them have stored."""

    is_serving = True

    def __init__(self, link: StorageLink) -> None:
        self.num_ranks = link.num_ranks
        self._link = link
        self._hashes: dict[str, Sequence[BlockHash]] = {}
        """Of stores that are under way."""
        self._answers: dict[str, list[RankDone]] = {}
        self._stored: dict[str, StoreDone] = {}
        """Stores whose markers are being written."""
        self._on_answer: Callable[[Answer], None] = lambda answer: None

    def is_connected(self, timeout_ms: int) -> bool:
        return self._link.is_connected(timeout_ms)

    @property
    def is_ready(self) -> bool:
        return self._link.is_ready

    def listen(self, on_answer: Callable[[Answer], None]) -> None:
        self._on_answer = on_answer
        self._link.listen(self._heard)

    def send(self, command: object) -> None:
        self._link.send(command)

    def use_namespace(self, namespace: Namespace) -> None:
        self._link.send(UseNamespace(namespace))

    def query(self, query_id: str, hashes: Sequence[BlockHash]) -> None:
        self._link.query(query_id, hashes)

    def load(self, load_id: str, hashes: Sequence[BlockHash], slots: Sequence[int]) -> None:
        self._link.send(LoadBlocks(load_id, tuple(hashes), tuple(slots)))

    def store(self, store_id: str, hashes: Sequence[BlockHash], slots: Sequence[int]) -> None:
        self._hashes[store_id] = hashes
        self._link.send(StoreBlocks(store_id, tuple(hashes), tuple(slots)))

    def touch(self, touch_id: str, hashes: Sequence[BlockHash]) -> None:
        self._link.touch(touch_id, hashes)

    def close(self) -> None:
        self._link.close()

    def _heard(self, answer: RankDone | CommitDone | QueryDone | TouchDone) -> None:
        if isinstance(answer, CommitDone):
            self._on_answer(replace(self._stored.pop(answer.store_id), error=answer.error))
        elif isinstance(answer, RankDone):
            self._merge(answer)
        else:
            self._on_answer(answer)

    def _merge(self, done: RankDone) -> None:
        answer = done.answer
        name = answer.load_id if isinstance(answer, LoadDone) else answer.store_id
        answers = self._answers.setdefault(name, [])
        answers.append(done)
        if len(answers) < self.num_ranks:
            return
        del self._answers[name]
        failed = next((each for each in answers if each.answer.error is not None), None)
        error = None if failed is None else f"rank {failed.rank}: {failed.answer.error}"
        seconds = max(each.answer.seconds for each in answers)
        num_bytes = sum(each.answer.num_bytes for each in answers)
        if isinstance(answer, LoadDone):
            loads = [each.answer for each in answers if isinstance(each.answer, LoadDone)]
            num_arrived = min(each.num_arrived for each in loads)
            is_damaged = any(each.is_damaged for each in loads)
            self._on_answer(LoadDone(name, num_arrived, is_damaged, num_bytes, seconds, error))
            return
        stores = [each.answer for each in answers if isinstance(each.answer, StoreDone)]
        written, refused = max(each.num_written for each in stores), max(each.num_refused for each in stores)
        stored = StoreDone(name, written, num_bytes, seconds, error, refused)
        hashes = self._hashes.pop(name)
        if self.num_ranks > 1 and error is None and not refused:
            self._stored[name] = stored
            self._link.commit(name, hashes)
        else:
            self._on_answer(stored)
