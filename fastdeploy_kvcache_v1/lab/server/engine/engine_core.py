"""The engine without threads and sockets: turns requests into steps and step results into output."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice

from ....contract.messages import BatchRequest, CacheLevel, PrefillTime, RankCopies, WorkerReport
from ....contract.tool_calls import ends_in_tool_call
from ....link.reports import FailedCopies
from ....scheduler.cache_manager import CacheManager
from ....scheduler.costs import PrefillCosts
from ....storage.engine.store_link import Answer
from ....storage.engine.tier import StorageTier
from ....telemetry.metrics import counter, histogram, part, source
from ....telemetry.trace_recorder import TraceRecorder
from ....transfer.rank_messages import TransferNews
from ...model.step import StepResult, StepTask
from ..prefill_job import PrefillAnswer
from .generation import Delta, Failure, Generation, State
from .offered_prefills import OfferedPrefills
from .peer_requests import PeerRequests
from .rank_answers import RankAnswers
from .remote_prefills import RemotePrefills
from .request_times import MOST_KEPT, RequestReport
from .scheduler import Scheduled, Scheduler

logger = logging.getLogger(__name__)

FETCHED_AHEAD = 32
"""Waiting requests from the head of the queue whose stored prefix is looked up."""

MAX_COPY_FAILURES = 3
"""Times that a request is recomputed after failed copies; the next failure ends it."""


_ended = partial(counter, "Requests by how they ended", "requests_ended", by="outcome")


@dataclass
class EngineCounters:
    """Totals since the start. Written by the engine thread only; any thread may read single fields."""

    copies: list[RankCopies]
    """The last report of each worker rank."""
    steps: int = counter("Batches sent to the worker")
    computed_tokens: int = counter("Tokens that went through the model")
    """Includes tokens recomputed after a preemption."""
    generated_tokens: int = counter("Tokens sampled")
    draft_tokens: int = counter("Draft tokens that were verified")
    accepted_draft_tokens: int = counter("Draft tokens that were accepted")
    finished: int = _ended()
    aborted: int = _ended()
    failed: int = _ended()


@source("engine")
class EngineCore:
    """Owns every request from submission to its last event. Single-threaded: the engine thread calls everything.

    Exactly one batch is in flight: `step` sends nothing until `on_step_result` took the last answer. Per step:
    match and allocate, drain the manager's swap step, send both as one batch; then take failures, tokens, commits.
    """

    scheduler: Scheduler = part(Scheduler)
    counters: EngineCounters = part(EngineCounters)
    observe_first_token: Callable[[float], None] = histogram(
        "From the arrival of a request to its first token",
        "time_to_first_token_seconds",
        buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
    )

    def __init__(
        self,
        manager: CacheManager,
        send: Callable[[BatchRequest], None],
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        storage: StorageTier | None = None,
        remote: RemotePrefills | None = None,
        offered: OfferedPrefills | None = None,
        recorder: TraceRecorder | None = None,
        clock: Callable[[], float] = time.monotonic,
        num_ranks: int = 1,
        tool_call_ends: frozenset[int] = frozenset(),
    ) -> None:
        """`send` takes a batch to each of `num_ranks` ranks, and each answers with one result. A decode server has
        `remote`, a prefill server `offered`. `tool_call_ends`: tokens of the model, see `tool_calls`.
        """
        self._clock = clock
        self.manager = manager
        self.scheduler = Scheduler(
            manager,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            may_start=self._may_start,
            is_remote=lambda generation, num_matched: remote is not None and remote.wants(generation, num_matched),
        )
        self._send = send
        self.prefill_costs = PrefillCosts()
        self.storage = storage
        if storage is not None:
            storage.weigh(self.prefill_costs.seconds)
        self.recorder = recorder
        self.peers = PeerRequests(manager, self.scheduler, remote=remote, offered=offered)
        self._lookahead = manager.config.lookahead_requests
        self.observe_first_token = lambda seconds: None
        self._generations: dict[str, Generation] = {}
        self._ended: deque[RequestReport] = deque(maxlen=MOST_KEPT)
        self._in_flight: list[Scheduled] | None = None
        self._step_in_flight = -1
        self._is_timed = False
        """The duration of the batch in flight measures its computation alone."""
        self._sent_at = 0.0
        self._computed_at = 0.0
        self._closed: Failure | None = None
        self._tool_call_ends = tool_call_ends
        self._num_ranks = num_ranks
        self._answers = RankAnswers(num_ranks)
        self._failed_copies = FailedCopies(num_ranks)
        self.counters = EngineCounters([RankCopies() for _ in range(num_ranks)])

    @property
    def is_idle(self) -> bool:
        return self.scheduler.is_idle and self._in_flight is None

    @property
    def seconds_without_layer(self) -> float:
        """How long the worker has computed no layer of its batch; 0 without a batch. Any thread may ask."""
        return 0.0 if self._in_flight is None else self._clock() - self._computed_at

    @property
    def closed(self) -> Failure | None:
        """Why requests are refused from now on, or None."""
        return self._closed

    def submit(self, generation: Generation) -> None:
        """Queue a request. Its sink gets deltas up to one with a finish reason, or one failure."""
        if self._closed is not None:
            generation.sink(self._closed)
            return
        if generation.request_id in self._generations or self.peers.knows(generation.request_id):
            # Ids of this server never repeat, but a decode server may send a job again.
            generation.sink(Failure(409, f"request {generation.request_id} is known already"))
            return
        self._generations[generation.request_id] = generation
        if self.recorder is not None:
            generation.ticket = self.recorder.arrived()
        self.scheduler.add(generation)

    def abort(self, request_id: str) -> None:
        """Drop a request whose client is gone; a finished one is already forgotten."""
        generation = self._generations.get(request_id)
        if generation is not None:
            self._end(generation, "aborted")

    def close(self, failure: Failure) -> None:
        """Answer each open and later request with `failure`. Leaves scheduler and manager alone: a bug there may be
        the reason.
        """
        self._closed = self._closed or failure
        generations, self._generations = self._generations, {}
        for generation in generations.values():
            generation.state = State.FINISHED
            self._count("failed", generation)
            self._record(generation)
            generation.sink(failure)

    def reset_cache(self, *, stored: bool = False) -> dict[str, list[str]]:
        """Forget cached blocks, with `stored` also the store's, which stay there for other servers. Running requests
        go on and cache nothing more. Returns the tiers that were reset and kept.
        """
        self.manager.reset_cache()
        tiers = {"reset": [CacheLevel.DEVICE.value], "kept": []}
        if self.manager.config.num_host_blocks:
            tiers["reset"].append(CacheLevel.HOST.value)
        if self.storage is not None:
            self.storage.cache_reset()
            if stored:
                self.storage.forget_stored()
            tiers["reset" if stored else "kept"].append(CacheLevel.STORAGE.value)
        return tiers

    def check(self) -> dict[str, object]:
        """Check the manager's invariants, and when idle for leaks. Raises `InvariantError`."""
        storage_is_idle = self.storage is None or self.storage.is_idle
        is_still = not self.manager.has_open_copies  # after a reset some wait for the next step
        if self.is_idle and storage_is_idle and self.peers.is_idle and is_still:
            self.manager.check_idle()
            self.peers.check_idle()
        else:
            self.manager.check()
        self._answers.check()
        return {
            "idle": self.is_idle and self.peers.is_idle,
            "storage_idle": storage_is_idle,
            "running": self.scheduler.num_running,
            "waiting": self.scheduler.num_waiting,
            "cache": asdict(self.manager.stats()),
        }

    def requests(self, limit: int) -> list[RequestReport]:
        """Up to `limit` requests: open ones by arrival, then ended ones, latest first."""
        now = self._clock()
        opened = (each.report(each.state.value, now) for each in self._generations.values())
        return [*islice(opened, limit), *islice(self._ended, max(0, limit - len(self._generations)))]

    def step(self) -> None:
        """Send the next batch, which may hold swaps alone, unless one is in flight."""
        self._fetch_ahead()
        if self._closed is None:
            self.peers.tick()
        while self._in_flight is None and self._closed is None:
            self.manager.expect([generation.hasher for generation in self.scheduler.next_waiting(self._lookahead)])
            plan = self.scheduler.schedule()
            for generation in self.peers.lost_offers():
                self._fail(generation, 503, "its blocks were needed for others")
            self.peers.admitted(plan)
            transfers = self.peers.take_commands()
            swap_step = self.manager.take_swap_step()
            if self.storage is not None:
                self.storage.step_taken(swap_step, computes=bool(plan))
                for generation in (*(item.generation for item in plan), *self.scheduler.newly_fetching):
                    self.storage.request_left(generation.request_id)
                self.storage.go_on()
            if plan or swap_step or transfers:
                self._sent_at = self._computed_at = self._clock()  # before `_in_flight`: `seconds_without_layer`
                self._in_flight, self._step_in_flight = plan, swap_step.step
                self._is_timed = self._num_ranks == 1 or not swap_step.swap_in
                self.counters.steps += 1
                for item in plan:
                    item.generation.times.started(self._sent_at - item.generation.submitted_at)
                tasks = [_task(item) for item in plan]
                self._send(BatchRequest(tasks, [swap_step] if swap_step else [], transfers))
            elif self.scheduler.refused is None or self._others_hold_blocks:
                return
            else:
                self._fail_unfit(self.scheduler.refused)

    def _may_start(self, generation: Generation) -> bool:
        """False for a waiting request that still expects blocks from storage."""
        if self.storage is None:
            return True
        may_start = self.storage.may_start(generation.request_id)
        generation.times.held(self._clock(), by_storage=not may_start)
        return may_start

    @property
    def _others_hold_blocks(self) -> bool:
        """A store or another server holds device blocks, and returns them without a step of this engine."""
        is_stored = self.storage is not None and self.storage.holds_device_blocks
        return is_stored or self.scheduler.num_aside > 0

    def _fetch_ahead(self) -> None:
        """Load stored blocks of the next requests, also of preempted ones, while others run."""
        if self.storage is None or self._closed is not None:
            return
        for generation in self.scheduler.next_waiting(FETCHED_AHEAD):
            if not self.storage.expects(generation.request_id):
                self.storage.request_arrived(generation.request_id, generation.hasher, generation.tokens)
        self.storage.look_again()
        self.storage.go_on()

    def on_layer(self) -> None:
        """The worker goes on with the batch in flight."""
        self._computed_at = self._clock()

    def on_step_result(self, answer: StepResult, rank: int = 0) -> None:
        """Take a rank's answer to the batch in flight. The step ends with the last one."""
        assert self._in_flight is not None, "the worker answered a batch that was not sent"
        retry = self._take_transfers(rank, answer.report)
        result = self._answers.take(rank, answer)
        if result is None:
            self._retry(retry)
            return
        plan, self._in_flight = self._in_flight, None
        if self.storage is not None:
            self.storage.pass_ended(self._step_in_flight)
        seconds, copies_s = self._clock() - self._sent_at, result.report.exposed_wait_since_last_s
        self._measure(plan, seconds - copies_s)
        retry = {**result.retry, **retry}
        for item in plan:
            generation = item.generation
            if generation.state is not State.RUNNING:  # ended while the worker was computing
                continue
            generation.times.computed(seconds, copies_s)
            request_id = generation.request_id
            if request_id in result.errors:
                self._fail(generation, 500, result.errors[request_id])
            elif request_id not in retry:
                self._advance(item, list(result.tokens.get(request_id, ())))
                generation.drafts = result.drafts.get(request_id, ())
        self._retry(retry)

    def _measure(self, plan: list[Scheduled], seconds: float) -> None:
        """Measure what the prompts of a step cost to compute.

        Steps of several ranks that load are left out: a rank may wait for its copies while another rank computes.
        """
        if not self._is_timed:
            return
        prompts = [(item.generation.num_computed, item.num_tokens) for item in plan if item.num_tokens > 1]
        chunks = [(start, start + count) for start, count in prompts]
        self.prefill_costs.computed(PrefillTime.of(chunks, seconds))

    def on_report(self, report: WorkerReport, rank: int = 0) -> None:
        """Take a rank's report of copies that ended between two steps."""
        self._retry(self._take_transfers(rank, report))

    def on_storage(self, answer: Answer) -> None:
        assert self.storage is not None, "there is no storage"
        if self._closed is None:
            self.storage.answered(answer)

    def on_transfer_news(self, news: TransferNews, rank: int = 0) -> None:
        """Take the leases and fetches that ended on a rank."""
        if self._closed is not None:
            return
        for end in self.peers.reported(news, rank):
            generation = self._generations.get(end.request_id)
            if generation is not None:  # the decode server no longer wants it
                self._fail(generation, 503, f"its blocks cannot be read any more: {end.error}")

    def on_prefill_answer(self, request_id: str, answer: PrefillAnswer | str) -> None:
        """Take the first token from a prefill server, or the error."""
        if self._closed is not None:
            return
        taken = self.peers.answered(request_id, answer)
        generation = self._generations.get(request_id)
        if taken is not None and generation is not None:
            generation.cached_tokens = taken.cached_tokens
            (delta,) = self._take_tokens(generation, [taken.token])
            if delta.finish_reason is not None:
                self._end(generation, "finished")
            generation.sink(delta)

    def seconds_to_next_deadline(self) -> float | None:
        """When to call `step` without an event; None: never."""
        if self._closed is not None:
            return None
        stored = None if self.storage is None else self.storage.seconds_to_next_deadline()
        return min((each for each in (stored, self.peers.seconds_to_deadline()) if each is not None), default=None)

    def _take_transfers(self, rank: int, report: WorkerReport) -> dict[str, str]:
        """Reasons by id for running requests that lost blocks to a failed copy."""
        self.counters.copies[rank] = report.copies or self.counters.copies[rank]
        affected: dict[str, str] = {}
        for result in self._failed_copies.take(rank, report):
            reason = f"copy of {result.num_blocks} blocks to the {result.target.value} tier failed: {result.error}"
            logger.warning("step %d: %s", result.step, reason)
            affected.update(dict.fromkeys(self.manager.transfer_failed(result), reason))
        if self.storage is not None:
            self.storage.copies_reported(rank, report)
        return affected

    def _retry(self, reasons: dict[str, str]) -> None:
        for request_id, reason in reasons.items():
            generation = self._generations.get(request_id)
            if generation is not None and generation.state is State.FETCHING:
                self.peers.lose(generation)
            if generation is None or generation.state is not State.RUNNING:
                continue
            generation.copy_failures += 1
            if generation.copy_failures > MAX_COPY_FAILURES:
                self._fail(generation, 500, f"{reason} (gave up after {MAX_COPY_FAILURES} more attempts)")
            else:
                self.scheduler.preempt(generation)

    def _advance(self, item: Scheduled, tokens: list[int]) -> None:
        """Commit the blocks of the scheduled tokens, and take the sampled tokens: one without drafts."""
        generation = item.generation
        generation.num_computed += item.num_tokens
        generation.has_computed = True
        self.counters.computed_tokens += item.num_tokens + len(item.drafts)
        self.counters.draft_tokens += len(item.drafts)
        deltas = self._take_tokens(generation, tokens)
        self.manager.commit(generation.request_id, generation.num_computed)
        if deltas and deltas[-1].finish_reason is not None:
            self._end(generation, "finished", is_computed=True)
        for delta in deltas:
            generation.sink(delta)

    def _take_tokens(self, generation: Generation, tokens: list[int]) -> list[Delta]:
        """Take `tokens` up to the end of the request. Each token before the last was a draft, and is computed."""
        deltas: list[Delta] = []
        for token in tokens:
            if not generation.num_outputs:
                generation.times.first_token_s = self._clock() - generation.submitted_at
                self.observe_first_token(generation.times.first_token_s)
                if generation.request.cache_report:
                    generation.miss = self.manager.miss(generation.request_id)
            if deltas:
                generation.num_computed += 1
                self.counters.accepted_draft_tokens += 1
            deltas.append(generation.append(token))
            self.counters.generated_tokens += 1
            if deltas[-1].finish_reason is not None:
                break
        return deltas

    def _fail(self, generation: Generation, status: int, message: str) -> None:
        self._end(generation, "failed")
        generation.sink(Failure(status, message))

    def _count(self, outcome: str, generation: Generation) -> None:
        """`outcome` is a field of `EngineCounters`."""
        setattr(self.counters, outcome, getattr(self.counters, outcome) + 1)
        self._ended.appendleft(generation.report(outcome, self._clock()))

    def _end(self, generation: Generation, outcome: str, *, is_computed: bool = False) -> None:
        """Return the request's blocks, or leave them to another server. Safe while a batch is in flight, because
        blocks are allocated after its answer.
        """
        del self._generations[generation.request_id]
        self._count(outcome, generation)
        answer, hasher = generation.tokens[len(generation.request.prompt_ids) :], generation.hasher
        hasher.session = hasher.session._replace(calls_tool=ends_in_tool_call(answer, self._tool_call_ends))
        if not (is_computed and self.peers.keep(generation)) and not self.peers.leave(generation):
            self.scheduler.finish(generation)
        self._record(generation)
        if self.storage is not None:
            self.storage.request_left(generation.request_id)
            if generation.has_computed:
                self.storage.request_ended(generation.hasher, generation.tokens)

    def _record(self, generation: Generation) -> None:
        if self.recorder is None or generation.ticket is None:
            return
        if generation.has_computed:
            self.recorder.ended(generation.ticket, generation.hasher, len(generation.request.prompt_ids))
        else:
            self.recorder.left(generation.ticket)

    def _fail_unfit(self, head: Generation) -> None:
        """Fail a request that finds no room although nothing runs or is copied: it would wait forever."""
        logger.error("request %s cannot be admitted although nothing runs: %s", head.request_id, self.manager.stats())
        self._fail(
            head,
            500,
            "the request does not fit the device tier although nothing else runs: raise --num-gpu-blocks-override",
        )


def _task(item: Scheduled) -> StepTask:
    generation = item.generation
    start = generation.num_computed
    end = start + item.num_tokens
    return StepTask(
        request_id=generation.request_id,
        token_ids=generation.tokens[start:end],
        start=start,
        block_table=item.block_table,
        needs_logits=item.reaches_end,
        sampling=generation.sampling,
        drafts=item.drafts,
        images=tuple(each for each in generation.request.images if each.offset < end and each.end > start),
    )
