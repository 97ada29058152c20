"""RequestTable: the requests of the cache manager, the slots they own and the cached paths they pin.

The contract of each method of a request's life is in the docstring of `CacheManager`'s method.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set

from ..config import KVCacheConfig
from ..contract.messages import (
    Allocation,
    BlockHash,
    BlockHashes,
    CacheLevel,
    DeviceSlot,
    MatchedSpan,
    MatchResult,
    NoSpace,
)
from ..contract.sessions import SessionHint
from ..errors import CacheStateError, UnknownRequestError
from .cache_stats import Counters
from .invariants import expect
from .radix_tree import RadixTree
from .request_state import RequestState
from .reuse.history import ReuseHistory
from .run import Run
from .tiering import Tiering
from .traffic.log import TrafficLog
from .traffic.misses import Misses


class RequestTable:
    """Requests by id. A request owns the slots of its block table until the tree takes the block."""

    def __init__(
        self,
        config: KVCacheConfig,
        tree: RadixTree,
        tiering: Tiering,
        counters: Counters,
        history: ReuseHistory | None,
        misses: Misses,
        log: TrafficLog | None,
    ) -> None:
        self._block_size = config.block_size
        self._caching = config.enable_prefix_caching
        self._tree = tree
        self._tiering = tiering
        self._counters = counters
        self._history = history
        self._misses = misses
        self._log = log
        self._requests: dict[str, RequestState] = {}
        self._clock_step = -1
        """Step in which the clock was read last."""
        self._admitted: dict[str, RequestState] = {}
        """Admitted in the open step: counted when it is taken or when they end, unless they are rolled back."""

    def __len__(self) -> int:
        return len(self._requests)

    def __getitem__(self, request_id: str) -> RequestState:
        try:
            return self._requests[request_id]
        except KeyError:
            raise UnknownRequestError(f"request {request_id} is unknown, or has been finished already") from None

    # ---- the life of a request

    def match(self, request_id: str, sequence: BlockHashes, max_blocks: int | None, *, resumed: bool) -> MatchResult:
        if request_id in self._requests:
            raise CacheStateError(f"request {request_id} is matched already: release or finish it first")
        limit = min(len(sequence.hashes), max(0, sequence.num_tokens - 1) // self._block_size)
        limit = limit if max_blocks is None else min(limit, max_blocks)
        limit = limit if sequence.access.reads else 0
        path = self._tree.match(sequence.hashes, limit)
        leaf = path[-1] if path else self._tree.root
        spans = [MatchedSpan(run.length, CacheLevel.DEVICE if run.on_device else CacheLevel.HOST) for run in path]
        num_cached = sum([span.length for span in spans])
        writes = self._caching and sequence.access.writes
        self._requests[request_id] = RequestState(request_id, sequence, leaf, num_cached, writes, resumed, limit)
        return MatchResult(request_id, tuple(spans), self._block_size)

    def allocate(self, request_id: str, num_tokens: int) -> Allocation | NoSpace:
        request = self[request_id]
        num_blocks = -(-num_tokens // self._block_size)
        if not request.admitted:
            return self._admit(request, num_blocks, num_tokens)
        slots = self._tiering.allocate_device(max(0, num_blocks - request.num_blocks))
        if isinstance(slots, NoSpace):
            return slots
        request.grow(slots, num_tokens, self._tiering.step)
        return Allocation(slots, 0, 0)

    def _admit(self, request: RequestState, num_blocks: int, num_tokens: int) -> Allocation | NoSpace:
        if num_blocks < request.num_cached:
            raise CacheStateError(f"request {request.request_id}: {num_tokens} tokens are fewer than its cached prefix")
        path = request.leaf.path()
        pieces = self._misses.pieces
        if self._clock_step != self._tiering.step:
            self._clock_step = self._tiering.step
            pieces.look_at_clock()
        request.num_left = pieces.num_left
        num_swap_in = sum([run.length for run in path if not run.on_device])
        slots = self._tiering.allocate_device(num_swap_in + num_blocks - request.num_cached)
        if isinstance(slots, NoSpace):
            return slots
        self._tiering.swap_in(path, slots[:num_swap_in])
        slots = slots[num_swap_in:] if num_swap_in else slots
        request.grow(slots, num_tokens, self._tiering.step)
        request.admitted, request.num_host_tokens = True, num_swap_in * self._block_size
        request.num_query_tokens = request.sequence.num_tokens if request.sequence.access.reads else 0
        self._admitted[request.request_id] = request
        num_cached_tokens = request.num_cached * self._block_size
        return Allocation(slots, num_cached_tokens - request.num_host_tokens, request.num_host_tokens)

    def commit(self, request_id: str, num_computed_tokens: int) -> None:
        request = self[request_id]
        end = request.committable_blocks(num_computed_tokens, self._block_size, open_step=self._tiering.step)
        first = request.num_cached
        if end <= first or not request.may_cache:
            return
        slots = request.tail[: end - first]
        runs, duplicates = self._tree.insert(request.leaf, request.sequence.hashes[first:end], slots)
        request.cache(runs, slots, duplicates)
        if request.computes is not None:
            self._misses.committed(request)
        if first < request.limit:
            request.computed = self._tiering.step
        else:
            request.grown = self._tiering.step
        self._counters.duplicate_blocks += len(duplicates)
        self._tiering.back_up_completed(runs, end - first)

    def uncommitted(self, request_id: str, num_computed_tokens: int) -> Sequence[BlockHash]:
        request = self[request_id]
        if not request.may_cache:
            return ()
        return request.sequence.hashes[request.num_cached : num_computed_tokens // self._block_size]

    def end(self, request_id: str, *, resumes: bool = False) -> None:
        """`resumes`: its session has not had this turn yet."""
        request = self[request_id]
        if self._admitted.pop(request_id, None) is not None:
            self._count(request)
        self._remove(request, touch=True, resumes=resumes)

    def roll_back(self, request_id: str) -> None:
        request = self[request_id]
        if request.has_committed:
            raise CacheStateError(f"request {request_id} has computed blocks: finish or preempt it instead")
        if request.admitted:
            self._counters.requests_rolled_back += 1
            if self._admitted.pop(request_id, None) is None:  # its step is taken, so it counts
                self.end(request_id, resumes=True)
                return
        self._remove(request, touch=False)

    def _remove(self, request: RequestState, *, touch: bool, resumes: bool = False) -> None:
        del self._requests[request.request_id]
        if request.computes is not None:
            self._misses.ended(request)
        if self._log is not None and request.start is not None:
            self._log.ended(request, self._tiering.step)
        if touch and self._history is not None and not request.leaf.detached:
            num_prompt = request.num_query_tokens // self._block_size
            visit, num_cached = request.visit, request.num_cached
            marks = self._history.ended(request.sequence, num_cached, visit, num_prompt, resumes=resumes)
            self._tree.mark(request.leaf, request.num_cached, *marks, self._history.now)
        self._tiering.free(request.own_slots(), CacheLevel.DEVICE)
        self._tree.release(request.leaf, touch=touch)

    # ---- all requests

    def count_admitted(self) -> None:
        """Count the requests that the open step admits, and their hits.

        No hits are counted for requests that resume (they find their own work) or do not read. Nor are hits of a prefix
        that a reset or a failed copy has removed since.
        """
        for request in self._admitted.values():
            self._count(request)
            if not request.resumed and not request.leaf.detached and request.sequence.access.reads:
                self._tiering.hit(request.leaf)
                if self._history is not None:
                    request.visit = self._history.arrived(request.sequence, request.num_cached)
                    if request.visit.left is not None:
                        self._tree.leave(request.visit.left)
        self._admitted.clear()

    def _count(self, request: RequestState) -> None:
        counters, num_cached_tokens = self._counters, request.num_cached * self._block_size
        if self._log is not None:
            self._log.started(request, self._misses.pieces.now)
        if request.resumed:
            counters.requests_resumed += 1
            counters.resumed_hit_tokens += num_cached_tokens
            return
        counters.requests_admitted += 1
        counters.query_tokens += request.num_query_tokens
        counters.unread_tokens += 0 if request.num_query_tokens else request.sequence.num_tokens
        counters.device_hit_tokens += num_cached_tokens - request.num_host_tokens
        counters.host_hit_tokens += request.num_host_tokens
        self._misses.count(request)

    def tell_return(self, hint: SessionHint) -> bool:
        session, has_changed = (None, False) if self._history is None else self._history.tell(hint)
        if session is not None and has_changed:
            self._tree.leave(session)
        return session is not None

    def drop_lost(self, lost: Set[Run]) -> list[str]:
        """Return the admitted requests that use a run of `lost`. Matches not admitted yet become empty instead."""
        affected = []
        for request_id, request in self._requests.items():
            if request.leaf not in lost:
                continue
            if request.admitted:
                affected.append(request_id)
            else:
                self._forget_match(request)
        return affected

    def end_all(self) -> None:
        for request_id in list(self._requests):
            self.end(request_id)

    def forget_matches(self) -> list[Run]:
        """Empty all matches not admitted yet and stop writes of the others. Returns the runs that these use."""
        for request in self._requests.values():  # before listing runs, because releasing a match may join them
            if request.admitted:
                request.writes = False
            else:
                self._forget_match(request)
        return [run for request in self._requests.values() for run in request.leaf.path()]

    def _forget_match(self, request: RequestState) -> None:
        self._tree.release(request.leaf, touch=False)
        request.leaf, request.num_cached = self._tree.root, 0

    # ---- looking

    def own_slots(self) -> list[DeviceSlot]:
        return [slot for request in self._requests.values() for slot in request.own_slots()]

    @property
    def num_own_slots(self) -> int:
        """O(requests)."""
        return sum(len(request.tail) + len(request.duplicates) for request in self._requests.values())

    def check(self, runs: Sequence[Run]) -> None:
        """Raise `InvariantError` unless every pin of `runs`, which must be all runs, is a request's. O(cache)."""
        paths = {request_id: request.leaf.path() for request_id, request in self._requests.items()}
        pins = Counter(run for path in paths.values() for run in path)
        for run in runs:
            expect(run.pins == pins[run], f"manager: a run is pinned {run.pins} times by {pins[run]} requests")
        for request_id, request in self._requests.items():
            request.check(paths[request_id])
        if self._history is not None:
            self._history.sessions.check()
        counters = self._counters
        self._misses.check(counters.query_tokens - counters.device_hit_tokens - counters.host_hit_tokens)
        expect(self._requests.keys() >= self._admitted.keys(), "manager: an ended request is still listed as admitted")

    def check_none(self) -> None:
        self._misses.check_none()
        expect(not self._requests, f"manager: requests never ended: {', '.join(list(self._requests)[:8])}")
