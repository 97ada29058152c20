"""RequestTable: the requests of the cache manager, the slots they own and the cached paths they pin.

The contract of each step of a request's life stands on `CacheManager`. Not thread-safe: the manager's lock covers it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set

from .block_pool import DeviceBlockPool
from .cache_stats import Counters
from .config import KVCacheConfig
from .errors import CacheStateError, UnknownRequestError
from .invariants import expect
from .metadata import Allocation, BlockHashes, DeviceSlot, MatchResult, NoSpace
from .open_step import OpenStep
from .radix_tree import RadixTree
from .request_state import RequestState
from .residency import Residency
from .run import Run
from .tiering import Tiering


class RequestTable:
    """Requests by their id. A slot of a block table belongs to the request until the tree takes the block."""

    def __init__(
        self,
        config: KVCacheConfig,
        tree: RadixTree,
        residency: Residency,
        tiering: Tiering,
        device_pool: DeviceBlockPool,
        counters: Counters,
    ) -> None:
        self._block_size = config.block_size
        self._caching = config.enable_prefix_caching
        self._tree = tree
        self._residency = residency
        self._tiering = tiering
        self._device_pool = device_pool
        self._counters = counters
        self._requests: dict[str, RequestState] = {}
        self._step = OpenStep(counters)
        self._epoch = 0
        """How often the cache was reset: what a request of an earlier epoch computes is never found."""

    def __len__(self) -> int:
        return len(self._requests)

    def __getitem__(self, request_id: str) -> RequestState:
        try:
            return self._requests[request_id]
        except KeyError:
            raise UnknownRequestError(f"request {request_id} is unknown, or has been finished already") from None

    # ---- the life of a request

    def match(self, request_id: str, sequence: BlockHashes, max_blocks: int | None) -> MatchResult:
        if request_id in self._requests:
            raise CacheStateError(f"request {request_id} is matched already: release or finish it first")
        limit = min(len(sequence.hashes), max(0, sequence.num_tokens - 1) // self._block_size)
        limit = limit if max_blocks is None else min(limit, max_blocks)
        leaf = self._tree.match(sequence.hashes, limit)
        spans = tuple(run.span() for run in self._tree.path(leaf))
        num_cached = sum(len(span.hashes) for span in spans)
        self._requests[request_id] = RequestState(request_id, sequence, leaf, num_cached, self._epoch)
        return MatchResult(request_id, spans, self._block_size)

    def allocate(self, request_id: str, num_tokens: int) -> Allocation | NoSpace:
        request = self[request_id]
        num_blocks = -(-num_tokens // self._block_size)
        if not request.admitted:
            return self._admit(request, num_blocks, num_tokens)
        slots = self._tiering.allocate_device(max(0, num_blocks - len(request.table)))
        if isinstance(slots, NoSpace):
            return slots
        request.grow(slots, num_tokens, self._step.number)
        return Allocation(list(request.table), slots, 0, 0)

    def _admit(self, request: RequestState, num_blocks: int, num_tokens: int) -> Allocation | NoSpace:
        if num_blocks < request.num_cached:
            raise CacheStateError(f"request {request.request_id}: {num_tokens} tokens are fewer than its cached prefix")
        path = self._tree.path(request.leaf)
        num_swap_in = sum(len(run.hashes) for run in path if run.device is None)
        slots = self._tiering.allocate_device(num_swap_in + num_blocks - request.num_cached)
        if isinstance(slots, NoSpace):
            return slots
        table, used = request.table, 0
        for run in path:
            if run.device is None:
                self._residency.start_swap_in(run, slots[used : used + len(run.hashes)])
                used += len(run.hashes)
            assert run.device is not None
            table += run.device
        request.grow(slots[used:], num_tokens, self._step.number)
        request.admit(used * self._block_size, self._block_size)
        self._step.admit(request)
        self._tree.hit(request.leaf)
        self._tiering.back_up_hit(path)
        return Allocation(list(table), slots[used:], request.num_device_tokens, request.num_host_tokens)

    def commit(self, request_id: str, num_computed_tokens: int, *, in_flight: bool) -> None:
        request = self[request_id]
        open_step = None if in_flight else self._step.number
        num_blocks = request.committable_blocks(num_computed_tokens, self._block_size, open_step=open_step)
        if in_flight:
            self._step.commit_later(request_id, num_blocks)
        else:
            self._commit(request, num_blocks)

    def _commit(self, request: RequestState, num_blocks: int) -> None:
        first = request.num_cached
        if num_blocks <= first or not self._caching:
            return
        if request.epoch != self._epoch or request.leaf.detached:
            return  # computed on top of blocks that were reset or lost: never to be found
        hashes = request.sequence.hashes[first:num_blocks]
        leaf, duplicates = self._tree.insert(request.leaf, hashes, request.table[first:num_blocks])
        request.leaf, request.num_cached, request.has_committed = leaf, num_blocks, True
        request.duplicates += duplicates
        self._counters.duplicate_blocks += len(duplicates)
        self._tiering.back_up_completed(self._tree.path(leaf), num_blocks - first)

    def end(self, request_id: str, *, touch: bool) -> None:
        """Its own slots are free again, its path is pinned once less, and most recently used if `touch`."""
        request = self[request_id]
        del self._requests[request_id]
        self._step.end(request_id)
        self._device_pool.free(request.own_slots())
        self._tree.release(request.leaf, touch=touch)

    def roll_back(self, request_id: str) -> None:
        request = self[request_id]
        if request.has_committed:
            raise CacheStateError(f"request {request_id} has computed blocks: finish or preempt it instead")
        if request.admitted:
            self._tree.hit(request.leaf, -1)
            self._step.roll_back(request_id)
        self.end(request_id, touch=False)

    # ---- all requests

    @property
    def step(self) -> int:
        """Number of the step that is being decided."""
        return self._step.number

    def close_step(self) -> None:
        """The worker has been told of the step: what it computes counts from now on."""
        for request_id, num_blocks in self._step.close().items():
            self._commit(self._requests[request_id], num_blocks)

    def drop_lost(self, lost: Set[Run], unfilled: Set[DeviceSlot]) -> list[str]:
        """Admitted requests that use a run of `lost`; matches that were not admitted yet simply become empty.

        `unfilled` slots got nothing: what was to be served from them is no hit.
        """
        affected = []
        for request_id, request in self._requests.items():
            if request.leaf not in lost:
                continue
            if request.admitted:
                affected.append(request_id)
            else:
                self._forget_match(request)
        self._step.void(affected, unfilled)
        return affected

    def start_epoch(self, *, end_all: bool) -> None:
        """The cache has been emptied: admitted requests go on with what they have, or end too with `end_all`."""
        self._epoch += 1
        for request_id, request in list(self._requests.items()):
            if end_all:
                self.end(request_id, touch=False)
            elif not request.admitted:
                self._forget_match(request)
                request.epoch = self._epoch

    def _forget_match(self, request: RequestState) -> None:
        self._tree.release(request.leaf, touch=False)
        request.leaf, request.num_cached = self._tree.root, 0

    # ---- looking

    @property
    def num_own_slots(self) -> int:
        """O(requests)."""
        return sum(request.num_own_slots for request in self._requests.values())

    def own_slots(self) -> list[DeviceSlot]:
        return [slot for request in self._requests.values() for slot in request.own_slots()]

    def check(self, runs: Sequence[Run]) -> None:
        """Raises `InvariantError` unless every pin of `runs`, all there are, is a request's; O(cache)."""
        paths = {request_id: self._tree.path(request.leaf) for request_id, request in self._requests.items()}
        pins = Counter(run for path in paths.values() for run in path)
        for run in runs:
            expect(run.pins == pins[run], f"manager: a run is pinned {run.pins} times by {pins[run]} requests")
        for request_id, request in self._requests.items():
            request.check(paths[request_id])
        expect(self._requests.keys() >= self._step.named_requests(), "manager: a request lives on")

    def check_none(self) -> None:
        expect(not self._requests, f"manager: requests never ended: {', '.join(list(self._requests)[:8])}")
