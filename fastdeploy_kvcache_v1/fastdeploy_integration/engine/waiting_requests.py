"""WaitingRequests: what is asked about requests before their match."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from ...scheduler.cache_manager import CacheManager
from .kept_hashes import KeptHashes
from .open_batch import OpenBatch
from .task_tokens import TaskTokens


class WaitingRequests:
    """Not thread-safe: the adapter's lock covers it."""

    def __init__(self, manager: CacheManager, batch: OpenBatch, kept: KeptHashes, block_size: int) -> None:
        self._manager = manager
        self._batch = batch
        self._kept = kept
        self._block_size = block_size

    def expect(self, line: Sequence[Any]) -> None:
        """See `PrefixCacheAdapter.expect`."""
        known = [self._kept.look(task) for task in line]
        with suppress(Exception):  # the edge to what clients send: the match of that request will say what is wrong
            self._hash_ahead(line, known)
        self._manager.expect([tokens for tokens in known if tokens is not None])

    def waits_for_prefill(self, task: Any, line: Iterable[Any]) -> bool:
        """See `PrefixCacheAdapter.waits_for_prefill`."""
        if not self._batch.prefills:
            return False
        tokens, others = self._tokens_of(task), (self._tokens_of(each) for each in line)
        num_cached = self._num_cached_blocks(tokens)
        if not self._batch.prefills.to_wait_for(tokens, num_cached, others):
            return False
        if tokens.tokens_before_wait is None:
            tokens.tokens_before_wait = num_cached * self._block_size
        return True

    def num_cached_tokens(self, task: Any) -> int:
        """Tokens that a match would find now."""
        return self._num_cached_blocks(self._tokens_of(task)) * self._block_size

    def _num_cached_blocks(self, tokens: TaskTokens) -> int:
        """What a match would find: no block with the last token."""
        if not tokens.access.reads:
            return 0
        before_last = max(0, tokens.num_tokens - 1) // self._block_size
        return min(self._manager.count_cached(tokens.hashes), before_last)

    def _tokens_of(self, task: Any) -> TaskTokens:
        """They are kept for its match."""
        tokens = self._kept.look(task)
        if tokens is None:
            tokens = TaskTokens(task, self._block_size)
            self._kept.keep(tokens)
        return tokens

    def _hash_ahead(self, line: Sequence[Any], known: list[TaskTokens | None]) -> None:
        """The first one without hashes."""
        for index, task in enumerate(line):
            if known[index] is None:
                known[index] = self._tokens_of(task)
                return
