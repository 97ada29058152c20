"""Which requests run in the next step, and with how many tokens. Decides over a `CacheManager`."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from operator import attrgetter
from typing import NamedTuple

from ....contract.messages import DeviceSlot, MatchResult, NoSpace
from ....scheduler.cache_manager import CacheManager
from ....scheduler.open_prefills import OpenPrefills
from ....telemetry.metrics import gauge_of
from .generation import Generation, State

BY_ARRIVAL = attrgetter("arrival")


class Scheduled(NamedTuple):
    """One request's share of a step."""

    generation: Generation
    num_tokens: int
    """Tokens `[num_computed, num_computed + num_tokens)` are computed."""
    block_table: list[DeviceSlot]
    drafts: tuple[int, ...] = ()
    """Guesses, computed behind those tokens."""

    @property
    def reaches_end(self) -> bool:
        """The step computes the request's last token, so the next one can be sampled."""
        return self.generation.num_pending == self.num_tokens


class Scheduler:
    """Continuous batching, first come first served, with chunked prefill and preemption. Engine thread only.

    A step has a token budget. Decoding requests (one pending token) take from it first, so that a long prompt does not
    stall them. Running prefills follow, then new requests. On a full device tier the latest arrival is preempted: its
    committed blocks stay cached, it keeps its output and resumes from them. So the earliest request always advances.

    A request is admitted when the device tier has room for all its tokens and some growth, beside the missing blocks of
    running requests. Otherwise two prompts that do not fit together would preempt each other by turns.

    A request waits a step for blocks that the step computes for another one, and keeps its place. Others pass it only
    with all their tokens, and only if seats, room and budget suffice for both. A request that expects blocks from
    storage lets others pass.

    A request whose prompt another server computes holds slots for all of it, set aside (`fetching`) until they are
    filled or given up. A computed request whose blocks another server reads is set aside too. Neither is preempted.
    """

    def __init__(
        self,
        manager: CacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        may_start: Callable[[Generation], bool],
        is_remote: Callable[[Generation, int], bool],
    ) -> None:
        """`may_start`: False while a request expects blocks from storage. `is_remote`: another server computes the
        prompt of a request with `num_matched` tokens here.
        """
        self._manager = manager
        self._block_size = block_size = manager.config.block_size
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._may_start = may_start
        self._is_remote = is_remote
        self._aside: dict[str, Generation] = {}
        """Requests with slots that are not computed: fetching, offered, leaving."""
        self.newly_fetching: list[Generation] = []
        """Admitted by the last `schedule`, for another server to fill."""
        self.lost_offers: list[Generation] = []
        """Preempted after their blocks were offered. They never start again; their end empties the list."""
        self._running: list[Generation] = []
        """In order of arrival, like `_waiting`."""
        self._waiting: list[Generation] = []
        self._num_arrivals = 0
        self._plan: dict[str, Scheduled] = {}
        self._budget = 0
        self._prefills = OpenPrefills(block_size, manager.config.shared_prefill_tokens)
        self._following: dict[int, int] = {}
        """Requests that wait for blocks of this step, by arrival: the further blocks that they need."""
        self.refused: Generation | None = None
        """The request at its turn that the last `schedule` could not admit."""

    @property
    def running(self) -> tuple[Generation, ...]:
        return tuple(self._running)

    @property
    def waiting(self) -> tuple[Generation, ...]:
        return tuple(self._waiting)

    def next_waiting(self, count: int) -> list[Generation]:
        """The first requests in the queue, whether they can start or not."""
        return self._waiting[:count]

    @property
    def head(self) -> Generation | None:
        """The next request to admit. O(requests before it that expect blocks)."""
        candidates = (each for each in self._waiting if each.arrival not in self._following)
        return next((each for each in candidates if self._may_start(each) and not each.has_lost_offer), None)

    @property
    @gauge_of("Requests by queue", "requests", state="running")
    def num_running(self) -> int:
        """Any thread may read it."""
        return len(self._running)

    @property
    @gauge_of("Requests by queue", "requests", state="waiting")
    def num_waiting(self) -> int:
        """Any thread may read it."""
        return len(self._waiting)

    @property
    def num_aside(self) -> int:
        """Requests with slots that are not computed. Any thread may read it."""
        return len(self._aside)

    @property
    def is_idle(self) -> bool:
        return not self._running and not self._waiting and not self._aside

    def add(self, generation: Generation) -> None:
        generation.arrival = self._num_arrivals
        self._num_arrivals += 1
        self._waiting.append(generation)

    def schedule(self) -> list[Scheduled]:
        """Plan a step. The caller takes the manager's swap step right after."""
        self._plan = {}
        self.newly_fetching = []
        self._budget = self._max_num_batched_tokens
        for generation in sorted(self._running, key=lambda g: g.num_pending > 1):  # stable: then by arrival
            self._continue(generation)
        self._admit_waiting()
        return list(self._plan.values())

    def preempt(self, generation: Generation) -> None:
        """Release a running request's blocks. It waits in its order of arrival and keeps its output."""
        assert generation.state is State.RUNNING, f"preempted request {generation.request_id} was not running"
        self._manager.preempt(generation.request_id)
        self._running.remove(generation)
        if generation.request.offered_to:
            generation.has_lost_offer = True
            self.lost_offers.append(generation)
        planned = self._plan.pop(generation.request_id, None)
        if planned is not None:
            self._budget += planned.num_tokens + len(planned.drafts)
        generation.state = State.WAITING
        generation.num_computed = 0
        insort(self._waiting, generation, key=BY_ARRIVAL)

    def finish(self, generation: Generation) -> None:
        """Forget a request in any state. Its committed blocks stay cached."""
        if generation.state is State.RUNNING:
            self._manager.finish(generation.request_id)
            self._running.remove(generation)
        elif generation.state is State.WAITING:
            self._leave_line(generation)
        elif self._aside.pop(generation.request_id, None) is not None:
            self._manager.finish(generation.request_id)
        generation.state = State.FINISHED

    def set_aside(self, generation: Generation) -> None:
        """Let a computed request keep its blocks until `finish`, while another server reads them."""
        self._running.remove(generation)
        self._aside[generation.request_id] = generation
        generation.state = State.OFFERED

    def resume(self, generation: Generation, num_computed: int) -> None:
        """Run a fetching request whose slots hold `num_computed` tokens. No byte can arrive in them."""
        assert generation.state is State.FETCHING, f"request {generation.request_id} was not fetching"
        del self._aside[generation.request_id]
        generation.state = State.RUNNING
        generation.num_computed = num_computed
        insort(self._running, generation, key=BY_ARRIVAL)

    def _continue(self, generation: Generation) -> None:
        """Schedule a running request. Preempt later ones, in the end itself, until its tokens have room."""
        while generation.state is State.RUNNING and self._budget:
            num_tokens = min(generation.num_pending, self._budget)
            reaches_end = num_tokens == generation.num_pending
            drafts = generation.usable_drafts[: self._budget - num_tokens] if reaches_end else ()
            end = generation.num_computed + num_tokens
            outcome = self._manager.allocate(generation.request_id, end + len(drafts))
            if isinstance(outcome, NoSpace) and drafts:  # a guess preempts no request
                drafts = ()
                outcome = self._manager.allocate(generation.request_id, end)
            if not isinstance(outcome, NoSpace):
                self._add_to_plan(generation, num_tokens, drafts)
                return
            self.preempt(self._running[-1])

    def _admit_waiting(self) -> None:
        self._following.clear()
        self._prefills.begin()
        for planned in self._plan.values() if self._waiting else ():
            self._announce(planned)
        num_owed = sum(self._num_owed_blocks(generation) for generation in (*self._running, *self._aside.values()))
        while (generation := self.head) is not None and self._take_turn(generation, num_owed):
            num_owed += self._num_owed_blocks(generation)
        self.refused = generation

    def _take_turn(self, generation: Generation, num_owed: int) -> bool:
        """Start a waiting request from its cached blocks and leave room for the `num_owed` blocks of earlier requests,
        or let it wait for blocks of this step. False, without a change, if it can do neither.
        """
        if self._num_seats_taken >= self._max_num_seqs or not self._budget:
            return False
        match = self._manager.match_prefix(generation.request_id, generation.hasher, resumed=generation.has_computed)
        if self._is_remote(generation, match.num_tokens):
            has_turn = self._admit_remote(generation, match, num_owed)
        else:
            has_turn = self._follow(generation, match, num_owed) or self._admit(generation, match, num_owed)
        if generation.state is State.WAITING:
            self._manager.release(generation.request_id)
        return has_turn

    def _leave_line(self, generation: Generation) -> None:
        at = bisect_left(self._waiting, generation.arrival, key=BY_ARRIVAL)
        assert self._waiting[at : at + 1] == [generation], f"request {generation.request_id} does not wait"
        del self._waiting[at]

    def _follow(self, generation: Generation, match: MatchResult, num_owed: int) -> bool:
        others = (each.hasher for each in self._waiting if each is not generation)
        num_shared = self._prefills.to_wait_for(generation.hasher, match.num_blocks, others)
        if not num_shared or not self._has_room(generation, match, num_owed - num_shared):
            return False
        self._following[generation.arrival] = self._num_needed_blocks(generation, match) - num_shared
        if generation.tokens_before_wait is None:
            generation.tokens_before_wait = match.num_tokens
        return True

    def _admit(self, generation: Generation, match: MatchResult, num_owed: int) -> bool:
        num_uncached = generation.num_tokens - match.num_tokens
        num_tokens = min(num_uncached, self._budget)
        if self._following and num_tokens < num_uncached:
            return False
        num_held = generation.num_tokens if generation.request.offered_to else match.num_tokens + num_tokens
        if not self._take_slots(generation, match, num_held, num_owed):
            return False
        insort(self._running, generation, key=BY_ARRIVAL)
        generation.state = State.RUNNING
        # Blocks that it found the first time may be evicted since.
        if generation.tokens_before_wait is not None:
            self._manager.count_shared_prefill(max(0, match.num_tokens - generation.tokens_before_wait))
            generation.tokens_before_wait = None
        known = generation.cached_tokens
        generation.cached_tokens = match.num_tokens if known is None else min(known, match.num_tokens)
        self._announce(self._add_to_plan(generation, num_tokens))
        return True

    def _admit_remote(self, generation: Generation, match: MatchResult, num_owed: int) -> bool:
        """Admit with slots for the whole prompt; another server fills those behind `match`."""
        if not self._take_slots(generation, match, generation.num_tokens, num_owed):
            return False
        self._aside[generation.request_id] = generation
        generation.state = State.FETCHING
        generation.cached_tokens = match.num_tokens
        self.newly_fetching.append(generation)
        return True

    def _take_slots(self, generation: Generation, match: MatchResult, num_tokens: int, num_owed: int) -> bool:
        """Take a request from the queue with slots for `num_tokens`, including `match`, if there is room."""
        if not self._has_room(generation, match, num_owed):
            return False
        outcome = self._manager.allocate(generation.request_id, num_tokens)
        if isinstance(outcome, NoSpace):
            return False
        assert outcome.num_cached_tokens == match.num_tokens, "an admitted request gets all that was matched"
        self._leave_line(generation)
        generation.num_computed = match.num_tokens
        return True

    @property
    def _num_seats_taken(self) -> int:
        num_fetching = sum(each.state is State.FETCHING for each in self._aside.values())
        return len(self._running) + len(self._following) + num_fetching

    def _announce(self, planned: Scheduled) -> None:
        """Let later requests wait for the blocks of this step. Decoding requests compute no block worth it."""
        if planned.num_tokens > 1:
            generation = planned.generation
            end = generation.num_computed + planned.num_tokens
            self._prefills.compute(generation.request_id, self._manager.uncommitted(generation.request_id, end))

    def _has_room(self, generation: Generation, match: MatchResult, num_owed: int) -> bool:
        """`match` is pinned, so its device blocks are not available."""
        return self._manager.num_available_device_blocks >= self._num_needed_blocks(generation, match) + num_owed

    def _num_needed_blocks(self, generation: Generation, match: MatchResult) -> int:
        """Device blocks that it needs beside those of `match`."""
        return self._num_wanted_blocks(generation) - (match.num_blocks - match.num_host_blocks)

    def _num_wanted_blocks(self, generation: Generation) -> int:
        """Blocks for all its tokens, and one to grow into if it may."""
        return self._num_blocks(min(generation.num_tokens + self._block_size, generation.max_computed))

    def _num_owed_blocks(self, generation: Generation) -> int:
        """Blocks that a request at its turn needs and does not have."""
        if generation.arrival in self._following:
            return self._following[generation.arrival]
        if generation.state in (State.OFFERED, State.LEAVING):
            return 0
        if generation.state is State.FETCHING or generation.request.offered_to:
            return self._num_wanted_blocks(generation) - self._num_blocks(len(generation.request.prompt_ids))
        planned = self._plan.get(generation.request_id)
        num_held = generation.num_computed + (0 if planned is None else planned.num_tokens)
        return self._num_wanted_blocks(generation) - self._num_blocks(num_held)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _add_to_plan(self, generation: Generation, num_tokens: int, drafts: tuple[int, ...] = ()) -> Scheduled:
        planned = Scheduled(generation, num_tokens, self._manager.block_table(generation.request_id), drafts)
        self._plan[generation.request_id] = planned
        self._budget -= num_tokens + len(drafts)
        return planned
