"""Random steps through the worker on a GPU, every read checked.

Passes overlap, graphs replay, draft layers count from 0, passes are skipped, tensors are dropped and made again, copies
fail. A seed decides all of it; on a real GPU all but how streams interleave.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from random_engine import RandomEngine, Work
from simulated_worker import SimulatedWorker

from fastdeploy_kvcache_v1.errors import TransferError
from fastdeploy_kvcache_v1.fastdeploy_integration.transport import ROWS_ATTRIBUTE, SWAP_ATTRIBUTE
from fastdeploy_kvcache_v1.metadata import CacheLevel, SwapStep, TransferReport
from fastdeploy_kvcache_v1.swap_message import START, encode
from fastdeploy_kvcache_v1.worker import ops
from fastdeploy_kvcache_v1.worker.ops import Implementation

BLOCK_SIZE, LAYERS = 4, 3
LOOK_EVERY = 25
"""Steps between two looks at what the model found wrong."""

SPIN = 20_000
"""Cycles of a stream that is held up."""


class Fault(Exception):
    """The cache is wrong: the model read, or was told, what is not so."""


class FailingCopies:
    """Stands before the copy ops, and lets one fail, before or after it submitted what it had to."""

    def __init__(self, random: random.Random) -> None:
        self.random = random
        self.armed = False
        self.num_failed = 0
        self._inner = {}
        for op in ("swap_cache_per_layer", "swap_cache_all_layers"):
            inner = ops.install(op, "cuda", Implementation("failing", lambda *given, op=op: self._copy(op, given)))
            self._inner[op] = inner

    def _copy(self, op: str, given: tuple[Any, ...]) -> None:
        fails, self.armed = self.armed and self.random.random() < 0.5, False
        if not fails or self.random.random() < 0.5:
            self._inner[op].run(*given)
        if fails:
            self.num_failed += 1
            raise OSError("injected")

    def remove(self) -> None:
        for op, inner in self._inner.items():
            ops.install(op, "cuda", inner)


class Chances(NamedTuple):
    """Of each thing that may happen in a step."""

    skip: float = 0.12
    prepare_only: float = 0.04
    graph: float = 0.2
    drop: float = 0.01
    fail: float = 0.04
    capture: float = 0.03
    idle: float = 0.1
    quiet: float = 0.15


@dataclass
class Seen:
    """What a run went through: a proof of something that never happened is none."""

    passes: int = 0
    copies: int = 0
    skipped: int = 0
    drops: int = 0
    failed: int = 0
    captures: int = 0
    quiet: int = 0
    tokens_read: int = 0

    def __add__(self, other: Seen) -> Seen:
        return Seen(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(Seen)))


class Simulation:
    """One seed. `progress` is called after every step: a fake GPU moves then."""

    def __init__(self, seed: int, chances: Chances = Chances()) -> None:  # noqa: B008  immutable
        self.random = random.Random(seed)
        self.chances, self.seen = chances, Seen()
        self.has_quiet_passes = seed % 3 == 1  # they end what skipped passes leave open
        self.has_store = seed % 5 != 0
        draft = seed % 2 == 0
        draft_tokens = 2 if draft or seed % 5 == 0 else 0
        self.engine = RandomEngine(seed, device_slots=24, host_slots=14, block_size=BLOCK_SIZE, drafts=draft_tokens)
        self.worker = SimulatedWorker(
            layers=LAYERS,
            device_slots=24,
            host_slots=14,
            block_size=BLOCK_SIZE,
            ahead=seed % 4,
            draft=draft,
            draft_tokens=self.engine.drafts,
            keep_host_memory=seed % 3 == 0,
            tell=self.hear,
            seed=seed,
        )
        self.copies = FailingCopies(self.random)
        self._evicted: dict[int, list[tuple[int, list[int]]]] = {}
        """Host slots and tags by step, of evictions not told of yet."""
        self._last_sent = START

    def run(self, steps: int, progress: Any = lambda: None) -> Seen:
        """Raises `Fault`."""
        try:
            for number in range(steps):
                self._step()
                progress()
                if number % LOOK_EVERY == 0:
                    self.look()
                    self.worker.check()
            self._settle()
            self.seen.failed += self.copies.num_failed
        finally:
            self.copies.remove()
        return self.seen

    # ---- a step

    def _step(self) -> None:
        chance = self.random.random
        if chance() < self.chances.drop:
            self._restart()
            self.seen.drops += 1
        self.copies.armed = chance() < self.chances.fail
        try:
            self._one_pass()
            if self.has_quiet_passes and chance() < self.chances.quiet:
                for _ in range(self.random.randint(1, 6)):
                    self._quiet_pass()
            if chance() < self.chances.capture:
                self.worker.capture()
                self.seen.captures += 1
            if chance() < self.chances.idle:
                self.worker.cache.report_while_idle()
        except TransferError:
            # The worker of a server ends here and begins anew. Without a failed copy it would have had no reason.
            if not self.copies.num_failed:
                raise
            self._restart()

    def _one_pass(self) -> None:
        kind = self.random.random()
        computes = kind >= self.chances.skip + self.chances.prepare_only
        tasks, step = self.engine.next_batch(has_pass=computes)
        self._attach(tasks, step)
        work = self.engine.compute() if computes else None
        if self.random.random() < 0.3:
            self.worker.delay(SPIN)
        self.worker.receive(tasks)
        self._execute(work, prepares=kind >= self.chances.skip)
        self.seen.skipped += not computes

    def _quiet_pass(self) -> None:
        """The engine is busy elsewhere: rows decode on without a batch."""
        self._execute(self.engine.decode_on(), prepares=True)
        self.seen.quiet += 1

    def _execute(self, work: Work | None, *, prepares: bool) -> None:
        graphs = [self.random.random() < self.chances.graph for _ in range(2)]
        self.worker.execute(work, graphs=graphs, prepares=prepares)
        self.seen.passes += work is not None
        self.seen.tokens_read += len(work.reads) if work else 0

    def _attach(self, tasks: list[Any], step: SwapStep) -> None:
        setattr(tasks[0], ROWS_ATTRIBUTE, self.engine.running())
        if not step:
            return
        setattr(tasks[0], SWAP_ATTRIBUTE, encode(step, self._last_sent))
        self._last_sent = step.step
        self.seen.copies += len(step.evict) + len(step.swap_in)
        for copies in step.transfers:
            if copies.target is CacheLevel.HOST:
                slots = copies.target_slots
                self._evicted[step.step] = [(slot, list(self.engine.host[slot] or ())) for slot in slots]

    def _restart(self) -> None:
        """Tensors are dropped, with everything in flight, and made again: nothing is cached but what a store has."""
        self.look()
        self.seen.failed += self.copies.num_failed
        self.copies.num_failed = 0
        self.worker.drop_tensors()
        self.engine.reset()
        self._evicted.clear()
        self._last_sent = START
        self.worker.make_tensors()
        for slot in self.engine.store_arrives() if self.has_store else ():
            self.worker.fill_on_host(slot, self.engine.host[slot] or [])

    # ---- checks

    def hear(self, report: TransferReport) -> None:
        """A copy to the host that is told of has to be there."""
        self.engine.hear(report)
        for result in report.transfers:
            if result.target is not CacheLevel.HOST:
                continue
            for slot, tags in self._evicted.pop(result.step, []):
                if result.ok and self.engine.host_writer[slot] == result.step:
                    self._require_on_host(slot, tags, f"step {result.step} was reported as copied")
        late = [step for step in self._evicted if step <= report.ended_through]
        if late:
            raise Fault(f"copies of steps {late} are not reported, but those up to {report.ended_through} have ended")

    def _require_on_host(self, slot: int, tags: list[int], why: str) -> None:
        if not self.worker.holds(self.worker.on_host(slot), tags):
            raise Fault(f"host slot {slot} does not hold its block, though {why}")

    def look(self) -> None:
        """Raises `Fault` when the model has read what it should not."""
        count, where, expected, found = self.worker.found_faults()
        if count:
            raise Fault(
                f"step {self.engine.step}: {count} tokens read wrong, first: slot {where // BLOCK_SIZE}, "
                f"token {where % BLOCK_SIZE}, tag {expected}, found {found}"
            )

    def _settle(self) -> None:
        """Everything has run: both tiers hold what they must."""
        self.look()
        device = self.worker.on_device()
        self.copies.armed = False
        try:
            self.worker.cache.report_while_idle()
        except TransferError:
            if not self.copies.num_failed:
                raise
            return
        for slot in self.engine._whole_blocks():
            if not self.worker.holds(device[slot], self.engine.device[slot]):
                raise Fault(f"device slot {slot} does not hold its block in the end")
        for slot, tags in enumerate(self.engine.host):
            if tags is not None and self._evicted.get(self.engine.host_writer[slot]) is None:
                self._require_on_host(slot, tags, "everything has run")
        self.worker.drop_tensors()
