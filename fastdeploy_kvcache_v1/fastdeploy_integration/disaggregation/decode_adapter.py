"""DecodeAdapter: the adapter of a decode server.

A request gets its seat and blocks when a prefill server asks for them, and runs when its blocks and its first token are
here. Its table begins with what is cached here, pinned from then on; ranks fetch the blocks behind that. Between the
two events it is in `Grants`, and what the cache manager holds of it is a `GrantedPrefix`: FastDeploy has not scheduled
it, and nothing of it is undone when a batch comes without it. With its first batch it becomes a request as any other,
and what was fetched can be matched once that batch is in the workers' queue.

Copies that it needs ride on the next batch, whatever that is for; where none comes, on one without work: see
`copies_wait`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from ...contract.messages import DeviceSlot, NoSpace, SwapStep
from ...errors import CacheStateError, InvariantError
from ...transfer.rank_messages import TransferNews
from ..engine.adapter import PrefixCacheAdapter
from ..engine.record import Record
from ..transport import RunningRow, TaskKind
from .asked_again import AskedAgain
from .granted_prefix import NO_STEP, GrantedPrefix, Match
from .grants import Grant, Grants, Lost
from .leases import RankNews
from .pausing import Gate
from .transfer_name import drop_inputs, name_of

logger = logging.getLogger(__name__)

ENDS_SEQUENCES = frozenset({TaskKind.PREEMPTED, TaskKind.ABORT})


class DecodeAdapter(PrefixCacheAdapter):
    """A preempted request ends: FastDeploy sends it to a prefill server again."""

    numbers_batches = True
    preempted_leave = True
    caches_outputs = True
    """Whether what a complete request generated is cached: 2.6 never says so on a decode server."""
    grants: Grants
    gate: Gate

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._granting: Match | None = None
        """Of the request that FastDeploy is about to give blocks: one at a time, its thread for that is one."""
        self._asked_again = AskedAgain(self._block_size)
        self._prefixes: dict[str, GrantedPrefix] = {}
        """Of requests with blocks that no batch had yet, by id."""
        self._last_taken = self._last_sent = NO_STEP
        """Steps that rode on a batch, and on one that has reached the workers' queue."""

    # ---- a request gets its blocks

    def granted(self, request: Any) -> Grant | None:
        """See `Grants.of`."""
        with self._lock:
            return self.grants.of(request)

    def may_grant(self, request: Any) -> bool:
        """Whether it comes from a prefill server with this package, and nothing of an earlier grant is left."""
        name = name_of(request)
        if name is None:
            logger.error(
                "request %s has no transfer name: its prefill server must run this package too", request.request_id
            )
            return False
        with self._lock:
            return not self.grants.is_ending(name)

    def preallocate(self, request: Any, allocate: Callable[[Any], bool]) -> bool:
        """FastDeploy gives `request`, which has a name, a seat and blocks for its prompt, by `allocate`: False, and
        nothing has changed, where it has no room. The table begins with what is cached; ranks fetch the rest.
        """
        found = self._match_prompt(request)
        self._granting, uncached = (None, found) if isinstance(found, str) else (found, found.tokens.uncached)
        is_done = False
        try:
            is_done = allocate(request)
        except CacheStateError as error:
            logger.warning("request %s gets no blocks yet, prefill asks again: %s", request.request_id, error)
        finally:
            match, self._granting = self._granting, None
            if not is_done and match is not None:
                self._undo(match)
        if is_done:
            if uncached is not None:
                with self._lock:
                    self.uncached.count(request, uncached)
            self.grant(request)
            drop_inputs(request)
        return is_done

    def _match_prompt(self, request: Any) -> Match | str:
        """Why it cannot be matched, for a request that is served without the cache: see `Uncached`."""
        try:
            tokens = self._asked_again.tokens_of(request)
            if tokens is None:
                return "items"
            with self._lock:
                return Match(request, tokens, self.manager.match_prefix(request.request_id, tokens))
        except Exception:  # the edge to what clients send
            logger.exception("request %s is served without the cache: matching it failed", request.request_id)
            return "failed"

    def _undo(self, match: Match) -> None:
        """FastDeploy gave nothing to a request that was matched."""
        with self._lock:
            self._prefixes.pop(match.request.request_id, None)
            self.manager.release(match.request.request_id)
        self._asked_again.keep(match.tokens)

    def can_allocate_gpu_blocks(self, num_blocks: int, try_free_gpu_blocks: bool = True) -> bool:
        """Blocks that a request which is given blocks has on the device already are none that it needs."""
        match = self._granting
        if match is not None and match.is_here:
            num_blocks -= match.num_on_device
        return super().can_allocate_gpu_blocks(num_blocks, try_free_gpu_blocks)

    def allocate_gpu_blocks(self, num_blocks: int, req_id: str | None = None) -> list[DeviceSlot]:
        """The whole table of a request that is given blocks."""
        with self._lock:
            match = self._granting
            if match is None or req_id is None or not match.is_here or match.request.request_id != req_id:
                return super().allocate_gpu_blocks(num_blocks, req_id)
            # What was found may be lost since: a batch that was lost empties the cache.
            num_found = self.manager.num_cached(req_id)
            admitted = self.manager.allocate(req_id, num_found * self._block_size)
            if isinstance(admitted, NoSpace):
                raise CacheStateError(f"{req_id}: no device room for {admitted.needed} host blocks")
            shared = self.manager.block_table(req_id)
            copied_by = self._step_of_copies() if shared else NO_STEP
            self._prefixes[req_id] = GrantedPrefix(
                Record(match.tokens, num_found), admitted.num_host_tokens // self._block_size, copied_by
            )
            return shared + super().allocate_gpu_blocks(num_blocks - len(shared), req_id)

    def _step_of_copies(self) -> int:
        """The step whose copies blocks may depend on that were matched just now, until its batch is sent."""
        if self.manager.has_open_copies:
            return self._last_taken + 1
        return self._last_taken if self._outbox.carries_copies else NO_STEP

    def grant(self, request: Any) -> None:
        """FastDeploy has given `request`, which has a name, a seat and blocks for its prompt."""
        name = name_of(request)
        assert name is not None
        count = -(-request.need_prefill_tokens // self._block_size)
        with self._lock:
            prefix = self._prefixes.get(request.request_id)
            first = 0 if prefix is None else prefix.num_blocks
            request.num_cached_blocks = first
            self.grants.grant(request, name, [int(slot) for slot in request.block_tables[first:count]], first)
            if prefix is not None:
                self._count_hits(prefix)
                if prefix.loss is not None:
                    self.grants.fail(request.request_id, prefix.loss)

    def _count_hits(self, prefix: GrantedPrefix) -> None:
        tokens, size = prefix.record.tokens, self._block_size
        if tokens.access.reads:
            on_device = prefix.num_blocks - prefix.num_host_blocks
            self.hit_rates.count(tokens.num_tokens, device=on_device * size, host=prefix.num_host_blocks * size)

    # ---- and gives them back

    def recycle_gpu_blocks(self, gpu_block_ids: Sequence[int] | int, req_id: str | None = None) -> None:
        """Blocks to which a rank may still write come back to the pool when it has said that it is over. 2.6 gives the
        whole table of a request back, also what is cached of it.
        """
        ids = [gpu_block_ids] if isinstance(gpu_block_ids, int) else list(gpu_block_ids)
        with self._lock:
            if req_id is not None and self._begins_with_its_own(ids, req_id):
                ids = ids[self._end(req_id) :]
            if req_id is None or not self.grants.recycle(ids, req_id):
                super().recycle_gpu_blocks(ids, req_id)

    def _begins_with_its_own(self, ids: Sequence[int], request_id: str) -> bool:
        """Whether `ids` begin with what the manager holds of the request with that id. FastDeploy forgets a complete
        request before it gives its blocks back: the id may be another one's by then.
        """
        if request_id not in self._prefixes and request_id not in self._records:
            return False
        held = self.manager.block_table(request_id)
        return list(ids[: len(held)]) == held

    def release_block_ids(self, task: Any) -> None:
        """2.5 says it before it gives back the other blocks."""
        with self._lock:
            prefix = self._prefixes.get(task.request_id)
            if self._record_of(task) is not None or (prefix is not None and prefix.record.tokens.task is task):
                self._end(task.request_id)

    def _end(self, request_id: str) -> int:
        """The manager lets a request go that it knows. Returns how many blocks of its table were the manager's."""
        prefix = self._prefixes.pop(request_id, None)
        if prefix is not None:
            self.manager.release(request_id)
            return prefix.num_blocks
        record = self._records[request_id]
        task = record.tokens.task
        if task.status.name == "FINISHED" and self.caches_outputs:
            self.cache_output_blocks(task, self._block_size)
        self._forget(request_id)
        return record.num_owned

    def give_back(self, slots: Sequence[int], request_id: str) -> None:
        """Parked blocks of a request come back to the pool."""
        super().recycle_gpu_blocks(slots, request_id)

    # ---- the batch

    def schedule_begins(self) -> None:
        """What FastDeploy frees from now on, the batch that it puts together has to tell the workers."""
        with self._lock:
            self.grants.schedule_begins()

    def update_cache_blocks(self, task: Any, block_size: int, num_computed_tokens: int) -> None:
        """FastDeploy says it while it puts a batch together, and 2.6 never: `send_swaps` knows."""

    def send_swaps(self, tasks: Sequence[Any], running: Sequence[RunningRow] | None = None) -> None:
        """The last thing."""
        with self._lock:
            for task in tasks:
                if task.task_type.value == TaskKind.PREFILL:
                    self._start(task)
            super().send_swaps(tasks, running)
            if not tasks:
                self.grants.scheduled(None, has_freed=False)

    def _start(self, task: Any) -> None:
        """The batch computes tokens of a request: those before them are in its blocks."""
        prefix = self._prefixes.pop(task.request_id, None)
        if prefix is not None:
            self._records[task.request_id] = prefix.record
        record = self._record_of(task)
        if record is not None:
            record.tokens.catch_up()
            super().update_cache_blocks(task, self._block_size, task.num_computed_tokens)

    def _batch_scheduled(self, tasks: Sequence[Any], step: SwapStep) -> None:
        self._last_taken = step.step
        has_freed = bool(step) or any(task.task_type.value in ENDS_SEQUENCES for task in tasks)
        self.grants.scheduled(step.step, has_freed=has_freed)

    def batch_sent(self) -> None:
        with self._lock:
            self._last_sent = self._last_taken
            super().batch_sent()

    def batch_lost(self) -> None:
        """What was matched on its copies holds nothing. FastDeploy takes back the blocks of its requests next, and the
        workers may have it all the same.
        """
        with self._lock:
            self.grants.schedule_begins()
            if self._outbox.carries_copies:
                for request_id, prefix in self._prefixes.items():
                    if prefix.copied_by >= self._last_taken:
                        self._lose(request_id, "copies of its cached blocks did not reach the worker")
            super().batch_lost()

    def copies_wait(self) -> Grant | None:
        """A request whose fetch waits for a step that no batch has brought to the workers; None without one."""
        with self._lock:
            return next((each for each in self.grants.waiting() if each.after_step > self._last_sent), None)

    def open_step(self) -> int:
        """The step whose copies no batch has yet; -1 where there are none."""
        return self._last_taken + 1 if self.manager.has_open_copies else NO_STEP

    # ---- the workers' side

    def take_news(self) -> None:
        """What the ranks have said."""
        with self._lock:
            for rank, news in self._rank_news():
                assert isinstance(news, TransferNews), f"a decode rank tells of leases: {news}"
                for result in news.fetches:
                    try:
                        self.grants.reported(rank, result)
                    except CacheStateError as error:
                        logger.error("%s", error)

    def _rank_news(self) -> Sequence[RankNews]:
        return ()

    def lost(self, aborted: set[str]) -> list[Lost]:
        """See `Grants.lost`."""
        with self._lock:
            return self.grants.lost(aborted)

    def take_token(self, output: Any) -> bool:
        """See `Grants.take_token`."""
        with self._lock:
            return self.grants.take_token(output)

    def knew(self, output: Any) -> bool:
        """Whether a request has had blocks here under the name that `output` carries."""
        with self._lock:
            return self.grants.knew(name_of(output))

    def take_ready(self, is_known: Callable[[str], bool]) -> list[Grant]:
        """See `Grants.take_ready`. A fetch begins behind the copies of its request's cached blocks: they came first."""
        with self._lock:
            return self.grants.take_ready(is_known)

    def _prefixes_lost(self, request_ids: Sequence[str]) -> None:
        """No batch has brought their copies, so they do not run yet."""
        for request_id in request_ids:
            self._lose(request_id, "a copy of its cached blocks failed")

    def _lose(self, request_id: str, reason: str) -> None:
        self._prefixes[request_id].loss = reason
        self.grants.fail(request_id, reason)

    # ---- administration

    def reset(self, wait_for_tasks_done: bool = False) -> None:
        with self._lock:
            self._prefixes.clear()
            super().reset(wait_for_tasks_done)

    def check(self) -> None:
        """Raises `InvariantError`."""
        super().check()
        with self._lock:
            self.grants.check()
            # What is fetched is no block of the cache.
            if not self.manager.lent_slots() >= self.grants.fetching_slots():
                raise InvariantError("adapter: a block is fetched that FastDeploy does not have")
            if both := self._prefixes.keys() & self._records.keys():
                raise InvariantError(f"adapter: {sorted(both)} run before their first batch")
            for request_id, prefix in self._prefixes.items():
                if prefix.num_blocks != self.manager.num_blocks(request_id):
                    raise InvariantError(f"adapter: request {request_id} has another table in the manager")

    def check_idle(self) -> None:
        """Raises `InvariantError` unless no request has blocks, and nothing is fetched."""
        self.check()
        with self._lock:
            self.grants.check_idle()
            if self._prefixes:
                raise InvariantError(f"adapter: {sorted(self._prefixes)} were granted and never ended")
            self.manager.check_idle()
