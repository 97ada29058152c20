"""Flushes: no block is stored; the store's index is told what this server has, and what it has lost."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence

from ...contract.messages import BlockHashes
from ...errors import ConfigError
from ...scheduler.cache_manager import CacheManager
from ..engine.breaker import Breaker
from ..engine.counters import StorageCounters
from ..engine.store_link import CommandLink
from ..engine.store_side import StoreSide
from ..engine.target import Prefix
from ..messages import StoreDone
from .target import plain_prefix
from .tasks import WriteStorageTask
from .token_index import Statement, TokenIndex

__all__ = ["Flushes"]

MOST_WAITING = 4096
"""Statements."""


class Flushes(StoreSide):
    """One statement is under way at a time, and made again until the store has taken it: their order is what makes the
    index true.
    """

    def __init__(
        self, manager: CacheManager, link: CommandLink, counters: StorageCounters, clock: Callable[[], float]
    ) -> None:
        """Takes the events of `manager` from here on; nothing else may. Raises `ConfigError` if it keeps none."""
        if not manager.config.max_queued_events:
            raise ConfigError("the index of the attention store follows cache events: set max_queued_events above 0")
        self._manager = manager
        self._block_size = manager.config.block_size
        self._link = link
        self._counters = counters
        self._breaker = Breaker(clock)
        self._index = TokenIndex()
        self._index.update(manager.take_events(), (), self._block_size)
        self._ended: list[Prefix] = []
        self._waiting: deque[Statement] = deque()
        self._under_way: tuple[str, Statement] | None = None
        self._numbers = itertools.count()

    def request_ended(self, sequence: BlockHashes, token_ids: Sequence[int]) -> None:
        prefix, num_skipped = plain_prefix(sequence, token_ids, self._block_size)
        self._counters.unaddressable_blocks += num_skipped
        self._ended.append(prefix)

    def go_on(self) -> None:
        # Otherwise a block may be in no tier although it is about to be copied to the host.
        if not self._manager.has_open_copies:
            self._follow()
        if self._under_way is None and self._waiting and self._breaker.may_pass():
            self._send()

    def _follow(self) -> None:
        ended, self._ended = self._ended, []
        for statement in self._index.update(self._manager.take_events(), ended, self._block_size):
            if len(self._waiting) == MOST_WAITING:
                self._waiting.popleft()
                self._counters.dropped_flushes += 1
            self._waiting.append(statement)

    def _send(self) -> None:
        task_id, statement = f"flush-{next(self._numbers)}", self._waiting.popleft()
        self._under_way = task_id, statement
        self._link.send(
            WriteStorageTask(
                task_id=task_id,
                token_ids=statement.token_ids,
                start_write_block_idx=statement.first,
                flush_cache_exists=statement.exists,
            )
        )

    def store_done(self, answer: StoreDone) -> None:
        assert self._under_way is not None and answer.store_id == self._under_way[0], "one statement at a time"
        _, statement = self._under_way
        self._under_way = None
        if answer.error is None:
            self._counters.flushes += 1
            self._breaker.succeeded()
        else:
            self._counters.flush_failures += 1
            self._breaker.failed(answer.error)
            self._waiting.appendleft(statement)

    @property
    def num_waiting(self) -> int:
        """Statements that the index has not taken yet."""
        return len(self._waiting) + (self._under_way is not None)

    @property
    def is_left_alone(self) -> bool:
        return self._breaker.is_open

    @property
    def is_idle(self) -> bool:
        """No slot is kept for a statement, however long it takes."""
        return True

    def seconds_to_next_deadline(self) -> float | None:
        return self._breaker.seconds_left() if self._waiting and self._under_way is None else None
