"""The embedded server's engine: the real core, scheduler and step runner, over a virtual device and a model in tags.

A step of the engine, the worker's pass and the arrival of its answer are events of the world, in any order.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from fastdeploy_kvcache_v1.contract.messages import BatchRequest, CacheAccess
from fastdeploy_kvcache_v1.contract.sessions import SessionHint
from fastdeploy_kvcache_v1.errors import TransferError
from fastdeploy_kvcache_v1.lab.model.sampler import SamplingParams
from fastdeploy_kvcache_v1.lab.model.step import StepResult, StepTask
from fastdeploy_kvcache_v1.lab.model.step_runner import StepRunner
from fastdeploy_kvcache_v1.lab.server.engine.engine_core import EngineCore
from fastdeploy_kvcache_v1.lab.server.engine.generation import Delta, Failure, Generation, GenerationRequest
from fastdeploy_kvcache_v1.scheduler.block_hashing import BlockHasher
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager
from fastdeploy_kvcache_v1.transfer.rank_messages import TransferNews
from fastdeploy_kvcache_v1.worker.cache_controller import CacheController
from fastdeploy_kvcache_v1.worker.runtime import Event
from tests.lab.server.random_text import byte_stream

from .chance import pick
from .clients import Request
from .memory import VOCABULARY, Prefix, Tags, WrongError, next_token
from .ranks import OWN_NOTHING, Tensors
from .streams import VirtualDevice

GREEDY = SamplingParams(temperature=0.0)


class EngineRank(Tensors):
    """The worker with its only rank."""

    def __init__(
        self, device: VirtualDevice, *, blocks: int, host_blocks: int, block_size: int, tags: Tags,
        on_device: bool = False, drafts: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(0, device, blocks=blocks, block_size=block_size, tags=tags, on_device=on_device)
        self.controller = CacheController(SimpleNamespace(layout=self.layout), runtime=device)
        self.controller.attach_kv_cache(self.by_name, blocks, host_blocks)
        self.runner = StepRunner(
            self._forward, self.controller, self.layers, block_size=block_size,
            guess=self._guess if drafts else None,
        )  # fmt: skip
        self.marks_own = True
        """True: a request that does not write computes other tags, so that a hit on them is noticed."""
        self.generations: dict[str, Generation] = {}
        """The requests of the batch, by name."""
        self._rows: dict[str, Any] = {}
        self._tasks: dict[int, StepTask] = {}

    def run(self, batch: BatchRequest) -> StepResult:
        self._tasks = {id(task.block_table): task for task in batch.requests}
        result = self.runner.run(batch)
        return replace(result, report=replace(result.report, exposed_wait_since_last_s=0.0))  # of a real clock

    def _forward(self, slices: Any, caches: Any, before_layer: Any) -> list[Any]:
        tasks = [self._tasks[id(each.block_table)] for each in slices]
        assert all(task.token_ids for task in tasks), "nothing is computed of a request"
        work = [(self._row(task), task.start, task.start + len(task.token_ids) + len(task.drafts)) for task in tasks]
        void: list[str] = []
        try:
            self._submit(work, before_layer, void)
        except TransferError:
            void.append("what was submitted reads blocks that did not arrive")
            raise
        for row, _, end in work:
            row.computed = end
        scores = np.eye(VOCABULARY + 1, dtype=np.float32)
        return [
            [scores[next_token(tag)] for tag in row.prefix.chain[end + 1 - each.num_logits : end + 1]]
            for (row, _, end), each in zip(work, slices, strict=True)
        ]

    def _guess(self, slices: Any, chosen: Any, caches: Any, before_layer: Any) -> list[Any]:
        """Draft tokens, of which two of three are right."""
        guesses: list[int | None] = []
        for each, token in zip(slices, chosen, strict=True):
            row = self._rows[self._tasks[id(each.block_table)].request_id]
            row.computed = each.end
            row.prefix.cut(row.computed)
            tag = 0 if token is None else self.tags.of(row.prefix.chain[-1], token)
            guesses.append(None if token is None else next_token(tag + (tag % 3 == 0)))
        return guesses

    def _row(self, task: StepTask) -> Any:
        row, generation = self._rows.get(task.request_id), self.generations[task.request_id]
        table = [int(slot) for slot in task.block_table]
        is_known = row is not None and row.generation is generation and row.computed == task.start
        if not is_known or table[: len(row.table)] != row.table:  # a table only grows, else it begins anew
            request = generation.sink.args[0]  # type: ignore[attr-defined]
            own_from = task.start if self.marks_own and not generation.hasher.access.writes else OWN_NOTHING
            row = self._rows[task.request_id] = SimpleNamespace(
                uid=request.uid, generation=generation, own_from=own_from, computed=task.start,
                prefix=Prefix(self.tags, (0, request.salt)),
            )  # fmt: skip
        row.prefix.cut(task.start)
        row.prefix.extend(generation.tokens[len(row.prefix.tokens) : task.start + len(task.token_ids)])
        row.prefix.extend(task.drafts)
        row.table = table
        return row


class Engine:
    """The engine thread and the worker of one server."""

    def __init__(
        self, world: Any, manager: CacheManager, rank: EngineRank, *, seats: int, budget: int, pace: float = 1.0,
        **outside: Any,
    ) -> None:  # fmt: skip
        """`pace` scales its clock, so how slow computing seems, and whether loading pays."""
        self.world, self.manager, self.rank = world, manager, rank
        self.block_size = manager.config.block_size
        self._sent: list[tuple[BatchRequest, dict[str, Generation]]] = []
        """Each batch with its requests: another request may have a name when the batch is taken."""
        self.core = EngineCore(
            manager, self._send, max_num_seqs=seats, max_num_batched_tokens=budget,
            clock=lambda: world.clock() * pace, **outside,
        )  # fmt: skip
        self.scheduler = self.core.scheduler
        self._answer: tuple[BatchRequest, StepResult, Event] | None = None
        """The answer arrives after the event."""
        self.peers: Any = None
        """`roles.Between`, which connects two engines."""
        self.news: list[tuple[int, TransferNews]] = []
        """(rank, news), in order per rank."""
        self.events = [(0.3, self.reset), (40, self.turn), (20, self.run_device)]
        self.parts = ("step", "take", "run_device", "answer", "report")

    def generation(
        self, name: str, request: Request, sink: Any, *, max_tokens: int, session: SessionHint | None = None,
        **options: Any,
    ) -> Generation:  # fmt: skip
        salt, access = request.salt or "", CacheAccess(request.reads, request.writes)
        hasher = BlockHasher(self.block_size, salt=salt.encode(), access=access, session=session or request.hint)
        hasher.extend(request.prompt)
        asked = GenerationRequest(name, tuple(request.prompt), max_tokens, GREEDY, cache_salt=salt, **options)
        return Generation(asked, hasher, byte_stream(), partial(sink, request))

    def _send(self, batch: BatchRequest) -> None:
        running = {each.request_id: each for each in self.scheduler.running}
        self._sent.append((batch, {task.request_id: running[task.request_id] for task in batch.requests}))

    # ---- events

    def turn(self, rng: random.Random) -> None:
        """Some parts of a step, in order, up to three times."""
        for part in self.parts * rng.randrange(1, 4):
            if rng.random() < 0.6:
                getattr(self, part)(rng)

    def step(self, rng: random.Random) -> None:
        self.core.step()

    def take(self, rng: random.Random) -> None:
        """The worker receives a batch and submits it."""
        if not self._sent or self._answer is not None:
            return
        batch, self.rank.generations = self._sent.pop()
        copies = (each for step in batch.swap_steps for each in (("out", step.swap_out), ("in", step.swap_in)))
        parts = [f"swap-{way} of {len(blocks)} block{'s' * (len(blocks) > 1)}" for way, blocks in copies if blocks]
        for task in batch.requests:
            last = task.start + len(task.token_ids) - 1
            parts.append(f"{task.request_id} computes {task.start}" + f" to {last}" * (last > task.start))
        self.world.log("batch:", ", ".join(parts))
        for command in batch.transfers:
            self.world.log(type(command).__name__, command[0])
            self.peers.handle(command)
        self._answer = batch, self.rank.run(batch), self.rank.device.compute_stream.record_event()

    def answer(self, rng: random.Random) -> None:
        if self._answer is not None and self._answer[2].done():
            (batch, result, _), self._answer = self._answer, None
            if self.peers is not None:
                self.peers.note_pass(self, batch, result)
            self.core.on_step_result(result)

    def report(self, rng: random.Random) -> None:
        """An idle worker reports its copies."""
        is_late = self.world.faults.draw("late report", rng)
        if self._answer is not None or not self.rank.runner.has_open_copies:
            return
        if is_late:
            self.world.faults.injected("late report")
        else:
            self.core.on_report(self.rank.runner.take_report())

    def tell_news(self, rng: random.Random) -> None:
        chosen = pick(self.news, rng.random())
        if chosen is not None:
            news = next(each for each in self.news if each[0] == chosen[0])
            self.news.remove(news)
            self.core.on_transfer_news(news[1], news[0])

    def run_device(self, rng: random.Random) -> None:
        self.rank.device.run_some(rng, rng.choice([4, 40, 200]))

    def reset(self, rng: random.Random) -> None:
        self.core.reset_cache(stored=rng.random() < 0.5)

    @property
    def is_idle(self) -> bool:
        is_still = not (self._sent or self._answer or self.news or self.rank.runner.has_open_copies)
        return is_still and self.core.is_idle and self.core.peers.is_idle and self.rank.device.is_idle


class EmbeddedHost:
    """A server as clients and the world see it, with the engines that help it."""

    pausing = ""

    def __init__(self, world: Any, engine: Engine, *others: Engine) -> None:
        self.world, self.engine, self.worker, self.engines = world, engine, engine, (engine, *others)
        self.block_size = engine.block_size
        self.count: Counter[str] = Counter()
        self.live: dict[str, Request] = {}
        """Requests by their name in the engine."""

    def name(self, request: Request) -> str:
        return request.request_id

    def add(self, request: Request, prefill_url: str | None = None) -> None:
        generation = self.engine.generation(self.name(request), request, self._hear, max_tokens=request.max_tokens)
        generation.prefill_url = prefill_url
        self.engine.core.submit(generation)
        if request.uid in self.world.clients.requests:
            self.live[self.name(request)] = request

    def tell(self, session: SessionHint) -> None:
        for engine in self.engines:
            self.count["told"] += engine.manager.tell_return(session)

    def _hear(self, request: Request, event: Delta | Failure) -> None:
        if isinstance(event, Failure):
            self._fail(request, event)
            return
        for token in event.token_ids:
            self.world.clients.token(request.uid, token, (0, request.salt), self.world.tags)
        if event.usage is not None and event.usage.cached_tokens and not request.reads:
            raise WrongError(f"{request.request_id} does not read the cache, but its usage is {event.usage}")
        if event.finish_reason is not None:
            self._end(request, "finished")

    def _fail(self, request: Request, failure: Failure) -> None:
        if failure.status == 409 and self.name(request) in self.live:
            self.world.clients.ended(request.uid, "refused")
        elif failure.status == 500 and "copy" in failure.message and self.world.faults.count["copy to device fails"]:
            self._end(request, "failed")
        else:
            raise WrongError(f"{request.request_id} fails: {failure}")

    def _end(self, request: Request, how: str) -> None:
        del self.live[self.name(request)]
        self.world.clients.ended(request.uid, how)

    def abort(self, request_id: str) -> None:
        for name, request in list(self.live.items()):
            if request.request_id == request_id:
                self.engine.core.abort(name)
                self._end(request, "aborted")

    @property
    def events(self) -> list[Any]:
        return [event for engine in self.engines for event in engine.events]

    @property
    def progress(self) -> Any:
        steps = [engine.core.counters.steps for engine in self.engines]
        return steps, sum(self.world.clients.num_ended.values())

    @property
    def is_idle(self) -> bool:
        return not self.live and all(engine.is_idle for engine in self.engines)

    def check(self) -> None:
        for engine in self.engines:
            engine.core.check()

    def check_idle(self) -> None:
        if not all(engine.core.check()["idle"] for engine in self.engines):
            raise WrongError("an engine is not idle")
        self.count["swapped in"] = self.engine.manager.stats().counters.swap_in_blocks
