"""Fetches: brings the stored prefix of requests that wait to a tier, piece by piece."""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...contract.messages import BlockHash, BlockHashes, CacheLevel, LoadSlots
from ...contract.misses import MissReason, StoredPrefix
from ...scheduler.cache_manager import CacheManager
from ..messages import Failing, LoadDone, QueryDone, TouchDone
from ..settings import Prefetch, StorageSettings
from .breaker import Breaker
from .counters import StorageCounters
from .fetch import Fetch, Piece
from .known_blocks import KnownBlocks
from .store_costs import PIECE_BLOCKS, StoreCosts
from .target import Target

__all__ = ["Fetches"]

PIECES_UNDER_WAY = 2
"""Of one request: one is being moved while the next one waits, so that the store never does."""

MOST_QUESTIONS = 64
"""That are not answered yet."""

TOUCH_EVERY_S = 30.0
TOUCHES_REMEMBERED = 1024

LOOK_EVERY_S = 0.05
LOOKED_AT = 32
"""Requests that have not started, the first ones: those behind them are looked at later."""

REQUESTS_UNDER_WAY = 4
"""Requests whose blocks are loaded at the same time, in order of arrival."""


@dataclass(eq=False, slots=True)
class _Waiting:
    sequence: BlockHashes
    token_ids: Sequence[int]
    num_cached: int = 0
    """Most blocks that were cached since it was last asked for."""
    holds_up: bool = True
    """See `Fetch`."""


class Fetches:
    """One thread uses it. Nothing in here blocks: questions and loads are answered later, by `query_done`, `load_done`.

    The scheduler never depends on a load: what did not arrive is not cached, and is computed.
    """

    def __init__(
        self,
        manager: CacheManager,
        settings: StorageSettings,
        target: Target,
        counters: StorageCounters,
        clock: Callable[[], float],
        known: KnownBlocks,
    ) -> None:
        self._manager = manager
        self._settings = settings
        self._target = target
        self._query_breaker, self._load_breaker = Breaker(clock), Breaker(clock)
        self._counters = counters
        self._known = known
        self.costs = StoreCosts(manager.config.block_size)
        self._clock = clock
        self._block_size = manager.config.block_size
        self._most_blocks = max(min(PIECE_BLOCKS, target.num_blocks), target.num_blocks // 4)
        """Being loaded at once: a part of the tier, which has to keep what is in use."""
        self._most_ahead = max(1, target.num_blocks * 3 // 4)
        """Loaded for requests that have not started: more would push each other out of the tier before that."""
        self._fetches: dict[str, Fetch] = {}
        """By request, in order of arrival. One that is over stays as long as its blocks wait for their request."""
        self._waiting: dict[str, _Waiting] = {}
        """Requests that have not started, in order of arrival."""
        self._looked_at = clock()
        self._pieces: dict[str, Piece] = {}
        self._held: deque[Piece] = deque()
        """Pieces whose slots may still be in use, in order of `after_step`."""
        self._queries: dict[str, Fetch] = {}
        self._loading: set[BlockHash] = set()
        """Blocks of all pieces: no other piece brings them."""
        self._numbers = itertools.count()
        self._answered_at, self._loaded_at = clock(), clock()
        """When the store last answered a question, and a load."""
        self._touched: dict[BlockHash, float] = {}
        """When a prefix, by its last block, was last said to be in use."""
        self.unused = KnownBlocks()
        """Loaded blocks that no request has used."""
        self._touches: dict[str, Sequence[BlockHash]] = {}
        """What the store was told, and has not answered."""

    def arrived(self, request_id: str, sequence: BlockHashes, token_ids: Sequence[int] = ()) -> None:
        """A request waits: look for its prefix, unless too little of it is missing to be worth it."""
        waiting = self._waiting[request_id] = _Waiting(sequence, token_ids)
        self._ask(request_id, waiting)

    def look_again(self) -> None:
        """Ask anew for requests that wait, and whose cached or loaded blocks have left the cache. Once per schedule."""
        now = self._clock()
        if now - self._looked_at < LOOK_EVERY_S:
            return
        self._looked_at = now
        for request_id, waiting in list(itertools.islice(self._waiting.items(), LOOKED_AT)):
            fetch = self._fetches.get(request_id)
            if fetch is None or fetch.is_over:
                num_cached = self._manager.count_cached(waiting.sequence.hashes)
                if self._is_short(waiting.num_cached - num_cached):
                    waiting.num_cached = max(waiting.num_cached, num_cached)
                else:
                    self._ask(request_id, waiting)

    def _ask(self, request_id: str, waiting: _Waiting) -> None:
        sequence = waiting.sequence
        prefix = self._target.prefix(sequence, waiting.token_ids)
        hashes = prefix.hashes
        cached = waiting.num_cached = self._manager.count_cached(hashes)
        now = self._clock()
        if cached:
            self._touch(hashes[:cached], now)
        if self._is_short(len(hashes) - cached):
            self._manager.tell_stored(request_id, StoredPrefix(beyond=MissReason.BELOW_THRESHOLD))
            return
        if len(self._queries) >= MOST_QUESTIONS:
            return
        if self._target.count_present(hashes) < cached:
            return  # what follows could not be cached
        if not self._target.is_serving or not self._load_breaker.would_pass or not self._query_breaker.may_pass():
            return
        fetch = Fetch(request_id, prefix, cached, now, sequence.num_tokens, next=cached, holds_up=waiting.holds_up)
        self._weigh(fetch, cached, len(hashes))
        query_id = f"query-{next(self._numbers)}"
        self._fetches[request_id] = self._queries[query_id] = fetch
        self._counters.queries += 1
        self._counters.queried_blocks += len(hashes) - cached
        self._target.query(query_id, prefix, cached)
        self._tell(fetch)

    def expects(self, request_id: str) -> bool:
        return request_id in self._waiting

    def may_start(self, request_id: str) -> bool:
        """False while the request should go on waiting for its stored prefix."""
        fetch = self._fetches.get(request_id)
        return fetch is None or self._seconds_left(fetch) <= 0

    def pass_by(self, request_id: str) -> None:
        """The request does not ask `may_start`: it starts when there is room for it, with what has arrived by then."""
        if request_id in self._waiting:
            self._waiting[request_id].holds_up = False
        fetch = self._fetches.get(request_id)
        if fetch is not None:
            fetch.holds_up = False

    def started(self, request_id: str) -> None:
        """The request has started, or is gone: nothing more is loaded for it. What is under way may still arrive."""
        self._waiting.pop(request_id, None)
        fetch = self._fetches.pop(request_id, None)
        if fetch is None or fetch.is_over or fetch.is_declined or self._settings.prefetch is Prefetch.BEST_EFFORT:
            return
        self._counters.late_requests += self._seconds_left(fetch) <= 0

    def query_done(self, answer: QueryDone) -> None:
        fetch = self._queries.pop(answer.query_id, None)
        self._answered_at = self._clock()
        self._counters.query_seconds += answer.seconds
        if answer.error is not None:
            self._counters.query_failures += 1
            self._query_breaker.failed(answer.error)
        else:
            self._query_breaker.succeeded()
            self.costs.asked(answer.seconds)
        if fetch is None:
            return
        self._counters.found_blocks += answer.num_stored
        fetch.num_stored = None if answer.error is not None else answer.num_stored
        is_short = self._is_short(answer.num_stored)
        if is_short:
            fetch.reason = MissReason.BELOW_THRESHOLD
        worth = 0 if is_short else min(answer.num_stored, self._most_ahead)
        fetch.end = fetch.begin + worth
        self._weigh(fetch, fetch.begin, fetch.end)
        if fetch.is_trial:
            fetch.end = min(fetch.end, fetch.begin + PIECE_BLOCKS)
            fetch.reason = MissReason.NOT_WORTH_LOADING
            if not worth:
                self.costs.not_tried()
        elif worth and not fetch.is_declined:
            self.costs.waits()
            if self._settings.prefetch is Prefetch.TIMEOUT:
                num_computed = self.costs.blocks_to_compute(fetch.begin, fetch.end, fetch.num_tokens)
                fetch.end -= num_computed
                if num_computed:
                    fetch.reason = MissReason.NOT_WORTH_LOADING
        self._tell(fetch)

    def _tell(self, fetch: Fetch) -> None:
        """Tell the manager what the store knows, in case that the request starts now."""
        if self._fetches.get(fetch.request_id) is not fetch:
            return
        hashes, stored = fetch.prefix.hashes, StoredPrefix(beyond=fetch.reason)
        if fetch.num_stored is not None:
            end = fetch.begin + fetch.num_stored
            was_stored = end < len(hashes) and hashes[end] in self._known
            beyond = MissReason.EVICTED_STORAGE if was_stored else MissReason.STORE_ABSENT
            stored = StoredPrefix(end, fetch.reason, beyond)
        self._manager.tell_stored(fetch.request_id, stored)

    def _weigh(self, fetch: Fetch, begin: int, end: int) -> None:
        """Does its request wait for blocks `[begin, end)`, all that are still to come?"""
        is_decided = fetch.is_declined or fetch.is_trial or fetch.is_over
        if is_decided or begin >= end or self._settings.prefetch is not Prefetch.TIMEOUT:
            return
        under_way = sum(len(piece.slots) for piece in self._pieces.values() if piece.fetch is not fetch)
        earlier = itertools.takewhile(lambda other: other is not fetch, self._fetches.values())
        num_ahead = under_way + sum(other.num_left for other in earlier)
        has_asked = fetch.end is not None
        if self.costs.is_worth_waiting(begin, end, num_ahead=num_ahead, has_asked=has_asked):
            return
        fetch.is_trial = self.costs.declined()
        fetch.is_declined = not fetch.is_trial
        self._counters.declined_requests += fetch.is_declined
        if fetch.is_declined:
            fetch.reason = MissReason.NOT_WORTH_LOADING
            self._tell(fetch)

    def load_failing(self, news: Failing) -> None:
        """From here on no request waits for the answer to this load."""
        piece = self._pieces[news.load_id]
        if piece.is_wanted and not piece.is_failing:
            self._load_breaker.failed(news.error)
        piece.is_failing = piece.fetch.is_declined = True
        piece.fetch.end = piece.fetch.next

    def load_done(self, answer: LoadDone) -> None:
        piece = self._pieces[answer.load_id]
        self._loading.difference_update(piece.hashes)
        self._counters.load.add(answer, answer.num_arrived)
        self._counters.damaged_blocks += answer.is_damaged
        if piece.is_wanted and not piece.is_failing:
            self._load_breaker.answered(answer.error)
            self._loaded_at = self._clock()
            if answer.num_arrived == len(piece.slots):
                self.costs.loaded(len(piece.slots), answer.seconds)
        fetch = piece.fetch
        fetch.num_under_way -= 1
        if answer.is_damaged:
            fetch.reason = MissReason.STORE_DAMAGED
            self._tell(fetch)
        self._complete(piece, answer.num_arrived)
        if self._fetches.get(fetch.request_id) is fetch and fetch.end is not None:
            self._weigh(fetch, self._first_to_come(fetch), fetch.end)

    def _first_to_come(self, fetch: Fetch) -> int:
        """The first block that has not arrived."""
        return min((piece.begin for piece in self._pieces.values() if piece.fetch is fetch), default=fetch.next)

    def _complete(self, piece: Piece, num_arrived: int) -> None:
        del self._pieces[piece.load_id]
        num_cached = self._manager.complete_load(piece.load_id, num_arrived)
        if not piece.is_wanted:
            return
        self._known.add(piece.hashes[:num_arrived])
        self.unused.add(piece.hashes[num_arrived - num_cached : num_arrived])
        fetch = piece.fetch
        if num_cached and (waiting := self._waiting.get(fetch.request_id)) is not None:
            waiting.num_cached = max(waiting.num_cached, piece.begin + num_arrived)
        if num_cached < len(piece.slots) and not self._is_present(fetch, piece.end):
            fetch.end = fetch.next  # nothing can be cached behind what is missing

    def go_on(self) -> None:
        """Begin what can begin now: call it once per step, and after answers and reports."""
        if not self._fetches and not self._held:
            return
        if self._held and self._target.room() < 0:
            self._give_back()
        while self._held and self._may_fill(self._held[0]):
            self._send(self._held.popleft())
        self._begin_pieces()

    def forget(self) -> None:
        """The cache was reset: nothing of what is under way is wanted. Its slots go back when it is answered."""
        self._fetches.clear()
        for piece in self._pieces.values():
            piece.is_wanted = False
        for waiting in self._waiting.values():
            waiting.num_cached = sys.maxsize  # all is missing now, whatever was asked for
        while self._held:
            self._take_back(self._held.popleft())
        self._touches.clear()
        self.unused.forget()

    @property
    def num_waiting_requests(self) -> int:
        """Requests that wait for their stored prefix. Any thread may read it. O(fetches)."""
        return sum(fetch.holds_up and self._seconds_left(fetch) > 0 for fetch in list(self._fetches.values()))

    @property
    def is_left_alone(self) -> bool:
        """The store is not asked for a while."""
        return not self._target.is_serving or self._query_breaker.is_open or self._load_breaker.is_open

    @property
    def is_idle(self) -> bool:
        """No slot is lent."""
        return not self._pieces

    def seconds_to_next_deadline(self) -> float | None:
        """When `may_start` changes for a request although nothing else happens: not above 0 if that is past, None for
        never.
        """
        left = [self._seconds_left(fetch) for fetch in self._fetches.values() if not fetch.is_over]
        return min((seconds for seconds in left if seconds > 0), default=min(left, default=None))

    def lent_since(self) -> float | None:
        """When the oldest device slots were lent that the store may fill; None for no such slots. Who waits for them
        must not keep back the batch that they wait for.
        """
        if self._target.level is not CacheLevel.DEVICE:
            return None
        waits = self._target.waits_for_batch
        return next((piece.begun_at for piece in self._pieces.values() if not waits(piece.after_step)), None)

    def _give_back(self) -> None:
        """Requests are short of slots, and without them there is no batch: those that wait for it are not lent then."""
        for piece in [each for each in self._held if self._target.waits_for_batch(each.after_step)]:
            self._held.remove(piece)
            self._take_back(piece)
            fetch = piece.fetch
            fetch.num_lent -= len(piece.slots)
            fetch.next = fetch.end = min(fetch.next, piece.begin)

    def _take_back(self, piece: Piece) -> None:
        """Of a piece that was not sent."""
        self._loading.difference_update(piece.hashes)
        del self._pieces[piece.load_id]
        self._manager.complete_load(piece.load_id, 0)
        piece.fetch.num_under_way -= 1

    def _begin_pieces(self) -> None:
        """Of a later request only if all that earlier ones lack has room beside it: it might push them out."""
        for fetch in [fetch for fetch in self._fetches.values() if fetch.is_over and not fetch.num_lent]:
            del self._fetches[fetch.request_id]
        left, requests_left = self._most_ahead, REQUESTS_UNDER_WAY
        for fetch in self._fetches.values():
            left -= fetch.num_lent
            requests_left -= not fetch.is_over
            while num_lent := self._begin_piece(fetch, left):
                left -= num_lent
            left -= fetch.num_left
            if not requests_left:
                break

    def _begin_piece(self, fetch: Fetch, most: int) -> int:
        """Lend slots for the next piece, at most for `most` blocks; returns for how many."""
        if fetch.end is None or fetch.next >= fetch.end or fetch.num_under_way >= PIECES_UNDER_WAY:
            return 0
        hashes, most = fetch.prefix.hashes, min(most, self._room())
        if not fetch.num_under_way:  # other requests have had the same blocks loaded, or computed, meanwhile
            fetch.next = max(fetch.next, min(fetch.end, self._target.count_present(hashes)))
        if most <= 0 or fetch.next >= fetch.end or hashes[fetch.next] in self._loading:
            return 0
        if self._load_breaker.is_open:
            if self._pieces:
                return 0  # their results decide
            if not self._load_breaker.may_pass():
                fetch.end = fetch.next
                return 0
        load_id = f"load-{next(self._numbers)}"
        most = min(most, fetch.end - fetch.next)
        lent = self._manager.begin_load(load_id, hashes, fetch.next, level=self._target.level, most=most)
        if not isinstance(lent, LoadSlots):
            fetch.end = fetch.next  # the tier is full of blocks in use
            return 0
        begin, fetch.next = fetch.next, fetch.next + len(lent.slots)
        piece = Piece(load_id, begin, lent.slots, lent.after_step, fetch, self._clock())
        self._pieces[load_id] = piece
        self._loading.update(piece.hashes)
        fetch.num_under_way += 1
        fetch.num_lent += len(lent.slots)
        if self._may_fill(piece):
            self._send(piece)
        else:
            self._held.append(piece)
        return len(lent.slots)

    def _room(self) -> int:
        """Blocks of the next piece, at most."""
        under_way = sum(len(piece.slots) for piece in self._pieces.values())
        return min(PIECE_BLOCKS, self._most_blocks - under_way, self._target.room())

    def _may_fill(self, piece: Piece) -> bool:
        return self._target.may_fill(piece.after_step, piece.begun_at)

    def _send(self, piece: Piece) -> None:
        self._target.load(piece.load_id, piece.fetch.prefix, piece.begin, piece.slots, piece.begun_at)

    def _is_present(self, fetch: Fetch, end: int) -> bool:
        """All blocks before `end` are: another request has brought or computed some of them."""
        return self._target.count_present(fetch.prefix.hashes) >= end

    def _touch(self, hashes: Sequence[BlockHash], now: float) -> None:
        """Blocks that are hit in the tiers above are not asked for, and would be taken for unused."""
        last = hashes[-1]
        if now - self._touched.get(last, -TOUCH_EVERY_S) < TOUCH_EVERY_S or len(self._touches) >= MOST_QUESTIONS:
            return
        self._touched.pop(last, None)
        self._touched[last] = now
        if len(self._touched) > TOUCHES_REMEMBERED:
            del self._touched[next(iter(self._touched))]
        touch_id = f"touch-{next(self._numbers)}"
        if self._target.touch(touch_id, hashes):
            self._touches[touch_id] = hashes

    def touch_done(self, answer: TouchDone) -> Sequence[BlockHash]:
        """Returns the blocks that are in use; none if the store was not asked, or the cache was reset since."""
        hashes = self._touches.pop(answer.touch_id, ())
        return () if answer.error is not None else hashes

    def _is_short(self, num_blocks: int) -> bool:
        return num_blocks * self._block_size < self._settings.min_tokens

    def _seconds_left(self, fetch: Fetch) -> float:
        """How long the request goes on waiting if nothing arrives."""
        now, settings = self._clock(), self._settings
        if fetch.is_over or fetch.is_declined or not self._target.is_serving:
            return 0.0
        if settings.prefetch is Prefetch.BEST_EFFORT:
            return 0.0
        if settings.prefetch is Prefetch.WAIT_COMPLETE:
            return max(fetch.asked_at, self._answered_at, self._loaded_at) + settings.stall_s - now
        return fetch.asked_at + self._patience(fetch) - now

    def _patience(self, fetch: Fetch) -> float:
        """How long the request waits by `TIMEOUT`. A load that is late costs no more than computing all of it again."""
        end = len(fetch.prefix.hashes) if fetch.end is None else fetch.end
        first, last = fetch.begin * self._block_size, end * self._block_size
        computing_s = None if fetch.is_trial else self.costs.compute_s(first, last)
        settings = self._settings
        least_s = settings.timeout_base_s + settings.timeout_per_1k_tokens_s * (last - first) / 1000
        return max(least_s, computing_s or 0.0)
