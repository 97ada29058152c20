"""Which requests run in the next step, and with how many tokens. Pure decisions over a `CacheManager`."""

from __future__ import annotations

from bisect import insort
from typing import NamedTuple

from ..cache_manager import CacheManager
from ..metadata import DeviceSlot, MatchResult, NoSpace
from .generation import Generation, State


class Scheduled(NamedTuple):
    """One request's share of a step."""

    generation: Generation
    num_tokens: int
    """Tokens `[num_computed, num_computed + num_tokens)` are computed."""
    block_table: list[DeviceSlot]

    @property
    def reaches_end(self) -> bool:
        """The step computes the request's last token, so its successor can be sampled."""
        return self.generation.num_pending == self.num_tokens


class Scheduler:
    """Continuous batching, first come first served, with chunked prefill and preemption. Engine thread only.

    A step has a token budget. Decoding requests (one pending token) draw from it first so that a long prompt never
    stalls them, then running prefills, then new requests. When the device tier is full the latest arrival is
    preempted: its committed blocks stay cached and it resumes from them, outputs kept. So the earliest request always
    advances, and every request ends.
    """

    def __init__(
        self, manager: CacheManager, *, block_size: int, max_num_seqs: int, max_num_batched_tokens: int
    ) -> None:
        self._manager = manager
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._running: list[Generation] = []
        """In order of arrival, as is `_waiting`."""
        self._waiting: list[Generation] = []
        self._num_arrivals = 0
        self._plan: dict[str, Scheduled] = {}
        self._budget = 0
        self.num_preemptions = 0

    @property
    def running(self) -> tuple[Generation, ...]:
        return tuple(self._running)

    @property
    def waiting(self) -> tuple[Generation, ...]:
        return tuple(self._waiting)

    @property
    def is_idle(self) -> bool:
        return not self._running and not self._waiting

    def add(self, generation: Generation) -> None:
        generation.arrival = self._num_arrivals
        self._num_arrivals += 1
        self._waiting.append(generation)

    def schedule(self) -> list[Scheduled]:
        """Plan one step. The caller drains the manager's swap step right after."""
        self._plan = {}
        self._budget = self._max_num_batched_tokens
        preemptions = self.num_preemptions
        for generation in sorted(self._running, key=lambda g: g.num_pending > 1):  # stable: then by arrival
            self._continue(generation)
        if self.num_preemptions == preemptions:  # whoever was just preempted would only take the space back
            while self._waiting and self._admit(self._waiting[0]):
                pass
        return list(self._plan.values())

    def preempt(self, generation: Generation) -> None:
        """Give up a running request's blocks; it waits in its order of arrival and keeps its outputs."""
        assert generation.state is State.RUNNING, f"preempted request {generation.request_id} was not running"
        self._manager.preempt(generation.request_id)
        self.num_preemptions += 1
        self._running.remove(generation)
        planned = self._plan.pop(generation.request_id, None)
        if planned is not None:
            self._budget += planned.num_tokens
        generation.state = State.WAITING
        generation.num_computed = 0
        insort(self._waiting, generation, key=lambda g: g.arrival)

    def finish(self, generation: Generation) -> None:
        """Forget a request, whatever state it is in; its committed blocks stay cached."""
        if generation.state is State.RUNNING:
            self._manager.finish(generation.request_id)
            self._running.remove(generation)
        elif generation.state is State.WAITING:
            self._waiting.remove(generation)
        generation.state = State.FINISHED

    def _continue(self, generation: Generation) -> None:
        """Schedule a running request, preempting later ones (at last itself) until its tokens have room."""
        while generation.state is State.RUNNING and self._budget:
            num_tokens = min(generation.num_pending, self._budget)
            outcome = self._manager.allocate(generation.request_id, generation.num_computed + num_tokens)
            if not isinstance(outcome, NoSpace):
                self._add_to_plan(generation, num_tokens)
                return
            self.preempt(self._running[-1])

    def _admit(self, generation: Generation) -> bool:
        """Start a waiting request from what is cached. False, without a trace, if it has to wait on."""
        if len(self._running) >= self._max_num_seqs or not self._budget:
            return False
        match = self._manager.match_prefix(generation.request_id, generation.hasher)
        num_tokens = min(generation.num_tokens - match.num_tokens, self._budget)
        end = match.num_tokens + num_tokens
        outcome = self._manager.allocate(generation.request_id, end) if self._has_room(match, end) else None
        if outcome is None or isinstance(outcome, NoSpace):
            self._manager.release(generation.request_id)
            return False
        assert outcome.num_cached_tokens == match.num_tokens, "an admitted request gets all that was matched"
        self._waiting.remove(generation)
        insort(self._running, generation, key=lambda g: g.arrival)
        generation.state = State.RUNNING
        generation.num_computed = match.num_tokens
        if generation.cached_tokens is None:
            generation.cached_tokens = match.num_tokens
        elif not generation.num_outputs:  # what was found the first time may be lost: it counts as computed then
            generation.cached_tokens = min(generation.cached_tokens, match.num_tokens)
        self._add_to_plan(generation, num_tokens)
        return True

    def _has_room(self, match: MatchResult, end: int) -> bool:
        """Leave one block per running request, or the newcomer would be preempted as soon as they grow."""
        needed = -(-end // self._block_size) - match.num_device_blocks
        headroom = len(self._running)
        return not headroom or self._manager.num_available_device_blocks >= needed + headroom

    def _add_to_plan(self, generation: Generation, num_tokens: int) -> None:
        block_table = self._manager.block_table(generation.request_id)
        self._plan[generation.request_id] = Scheduled(generation, num_tokens, block_table)
        self._budget -= num_tokens
