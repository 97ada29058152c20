"""Plays logged requests against a `CacheManager` of any size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from ..config import KVCacheConfig
from ..contract.messages import BlockHash, CacheAccess, NoSpace
from ..contract.sessions import SessionHint
from ..scheduler.block_hashing import GivenHashes
from ..scheduler.cache_manager import CacheManager
from ..scheduler.traffic.log import NAME_BYTES, Row, Traffic


class Logged(NamedTuple):
    """A request, with the hashes of its sampled blocks."""

    row: Row
    hashes: Sequence[BlockHash]


class Outcome(NamedTuple):
    """In sampled blocks."""

    hits: list[int]
    """By measured request."""
    written: int
    """Copied to the host."""
    num_evicted: int
    """That left the last tier, also before the measured requests."""


Event = tuple[int, int, int]
"""The step that is open, a kind, and the index of the request."""
COMPUTED, GROWN, END, START = range(4)
"""In this order within a step: what the passes of the step before have computed comes first."""


class Simulation:
    """Plays `traffic` at any number of sizes. A sampled block stands for as many blocks as the rate says, and the tiers
    are as many times smaller. Not thread-safe.
    """

    def __init__(self, traffic: Traffic, config: KVCacheConfig, num_warm: int = 0) -> None:
        """`config`: of the real cache. The first `num_warm` requests are not measured."""
        self._rate, self._num_warm = traffic.rate, num_warm
        block_size = config.block_size * traffic.rate  # by which a session rewrites the end of its prompt
        self._config = replace(config, block_size=block_size, max_queued_events=0, lookahead_requests=0)
        self._requests = [Logged(row, _hashes(row.names)) for row in traffic.rows]
        self._events = sorted(event for index, each in enumerate(self._requests) for event in _events(index, each.row))

    def play(self, num_device_blocks: int, num_host_blocks: int) -> Outcome:
        """Play all requests against empty tiers of this size."""
        device, host = max(1, round(num_device_blocks / self._rate)), round(num_host_blocks / self._rate)
        config = replace(self._config, num_device_blocks=device, num_host_blocks=host)
        cache = _SizedCache(config, self._requests, self._num_warm)
        for (_, kind), events in groupby(self._events, key=itemgetter(0, 1)):
            cache.play(kind, [index for _, _, index in events])
        return cache.outcome()


class _SizedCache:
    """A manager, and the requests that it runs. A start without room ends the oldest ones: a server of this size would
    run fewer at once.
    """

    def __init__(self, config: KVCacheConfig, requests: Sequence[Logged], num_warm: int) -> None:
        self._requests, self._num_warm, self._block_size = requests, num_warm, config.block_size
        self._now_s = 0.0
        self._manager = CacheManager(config, lambda: self._now_s, logs_traffic=False)
        self._open: dict[int, GivenHashes] = {}
        self._hits, self._written = [0] * len(requests), 0

    def outcome(self) -> Outcome:
        counters = self._manager.stats().counters
        hits = self._hits[self._num_warm :]
        return Outcome(hits, self._written, counters.host_evicted_blocks + counters.device_lost_blocks)

    def play(self, kind: int, indices: Sequence[int]) -> None:
        """Play all events of one kind in a step."""
        if kind == START:
            for index in indices:
                self._start(index)
            self._take_step(indices[-1])
            return
        act: Callable[[int], None] = (self._compute, self._grow, self._end)[kind]
        for index in indices:
            if index in self._open:
                act(index)

    def _start(self, index: int) -> None:
        row, hashes = self._requests[index]
        manager, name, num_tokens = self._manager, str(index), row.num_prompt * self._block_size
        self._now_s = max(self._now_s, row.started_s)
        sequence = GivenHashes(hashes[: row.num_prompt], num_tokens + 1, SessionHint(row.session, row.tenant))
        sequence.access = CacheAccess(row.reads, row.writes)
        while True:
            manager.match_prefix(name, sequence, max_blocks=row.num_findable, resumed=row.is_resumed)
            allocation = manager.allocate(name, num_tokens)
            if not isinstance(allocation, NoSpace):
                break
            manager.release(name)
            if not self._open:
                return  # longer than this tier
            self._take_step(index)
            self._end_oldest()
        self._open[index] = sequence
        if not row.is_resumed:
            self._hits[index] = (allocation.num_device_tokens + allocation.num_host_tokens) // self._block_size

    def _compute(self, index: int) -> None:
        self._manager.commit(str(index), self._requests[index].row.num_prompt * self._block_size)

    def _grow(self, index: int) -> None:
        sequence, hashes = self._open[index], self._requests[index].hashes
        num_tokens = len(hashes) * self._block_size
        if isinstance(self._manager.allocate(str(index), num_tokens), NoSpace):
            return
        sequence.hashes, sequence.num_tokens = hashes, num_tokens + 1
        self._take_step(index)
        self._manager.commit(str(index), num_tokens)

    def _end_oldest(self) -> None:
        oldest = next(iter(self._open))
        self._compute(oldest)
        self._end(oldest)

    def _end(self, index: int) -> None:
        row, sequence = self._requests[index].row, self._open.pop(index)
        self._now_s = max(self._now_s, row.ended_s)
        sequence.session = sequence.session._replace(return_in_s=row.return_in_s, calls_tool=row.calls_tool)
        self._manager.finish(str(index))

    def _take_step(self, index: int) -> None:
        step = self._manager.take_swap_step()
        if index >= self._num_warm:
            self._written += len(step.swap_out)


def _events(index: int, row: Row) -> Iterator[Event]:
    for step, kind in ((row.started, START), (row.computed, COMPUTED), (row.grown, GROWN), (row.ended, END)):
        if step or kind == START:
            yield step, kind, index


def _hashes(names: bytes) -> list[BlockHash]:
    return [BlockHash(names[at : at + NAME_BYTES]) for at in range(0, len(names), NAME_BYTES)]
