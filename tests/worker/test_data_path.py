"""The data path under random delays: what attention reads is right, and nobody touches a slot while it is written.

Random steps go to a controller whose copy and compute streams are threads that run at random speeds. A sequential
model says what every slot holds after each step; the compute thread compares what it reads with it, byte for byte.
Every access records when it begins and ends, so that two conflicting ones at a time are seen even if the bytes happen
to be right. To show that this test sees what it should, every rule of the hazard table is then taken away once.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from fastdeploy_kvcache_v1 import ops
from fastdeploy_kvcache_v1.hazards import Actor, Dependency, Hazard, SlotTable
from fastdeploy_kvcache_v1.layer_done_counter import LayerDoneCounter
from fastdeploy_kvcache_v1.metadata import NO_EVICT, NO_SWAP_IN, TransferResult
from fastdeploy_kvcache_v1.ops import Implementation, LayerRows
from fastdeploy_kvcache_v1.runtime import CpuRuntime
from tests.worker.worker_fakes import Rig, evict, swap_in

PLACEHOLDER = Implementation("placeholder", lambda *_: None)

Place = tuple[str, int, int]
"""(tier, layer, slot)"""

DEVICE_SLOTS, HOST_SLOTS = 8, 8


class Recorder:
    """Who is at which place right now. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readers: dict[Place, int] = {}
        self._writers: dict[Place, int] = {}
        self.accesses = 0
        self.faults: list[str] = []

    @contextlib.contextmanager
    def access(self, actor: Actor, reads: list[Place], writes: list[Place]) -> Iterator[None]:
        reads = [place for place in reads if place not in writes]
        with self._lock:
            self.accesses += 1
            for place in reads:
                if self._writers.get(place):
                    self.faults.append(f"{actor.value} reads {place} while it is written")
                self._readers[place] = self._readers.get(place, 0) + 1
            for place in writes:
                if self._writers.get(place) or self._readers.get(place):
                    self.faults.append(f"{actor.value} writes {place} while it is in use")
                self._writers[place] = self._writers.get(place, 0) + 1
        try:
            yield
        finally:
            with self._lock:
                for place in reads:
                    self._readers[place] -= 1
                for place in writes:
                    self._writers[place] -= 1

    def fault(self, text: str) -> None:
        with self._lock:
            self.faults.append(text)


class DataPath:
    """The rig, the sequential model, and the random steps."""

    def __init__(self, seed: int, pause: Callable[[Actor], None], *, unknown_slots: bool) -> None:
        self.random = random.Random(seed)
        self.pause = pause
        self.unknown_slots = unknown_slots
        self.recorder = Recorder()
        self.rig = Rig(CpuRuntime(threaded_compute=True), device=DEVICE_SLOTS, host=HOST_SLOTS)
        self.device = [0] * DEVICE_SLOTS
        self.host = [0] * HOST_SLOTS
        self.contents = 0
        self._where: dict[int, tuple[str, int]] = {}
        for layer in range(self.rig.layout.num_layers):
            self._where[self.rig.caches[2 * layer].ctypes.data] = ("device", layer)
            self._where[self.rig.controller.host_pool.layers[layer][0].address] = ("host", layer)

    def places(self, rows: LayerRows, slots: list[int]) -> list[Place]:
        tier, layer = self._where[rows[0].address]
        return [(tier, layer, slot) for slot in slots]

    @contextlib.contextmanager
    def instrumented(self) -> Iterator[None]:
        """Record every copy by standing in for the ops, the way a compiled op would."""

        def watched(run: Callable[..., None]) -> Callable[..., None]:
            def watching(targets, sources, runs, stream):  # type: ignore[no-untyped-def]
                many = isinstance(targets[0], tuple)
                reads, writes = [], []
                for to, of in zip(targets, sources, strict=True) if many else [(targets, sources)]:
                    reads += self.places(of, [r.source + i for r in runs for i in range(r.blocks)])
                    writes += self.places(to, [r.target + i for r in runs for i in range(r.blocks)])
                actor = Actor.INPUT if writes[0][0] == "device" else Actor.OUTPUT
                with self.recorder.access(actor, reads, writes):
                    self.pause(actor)
                    run(targets, sources, runs, stream)

            return watching

        with contextlib.ExitStack() as undo:
            for op in ("swap_cache_per_layer", "swap_cache_all_layers"):
                original = ops.install(op, "cpu", PLACEHOLDER)
                undo.callback(ops.install, op, "cpu", original)
                ops.install(op, "cpu", Implementation("watched", watched(original.run)))
            yield

    def some(self, count: int, most: int, without: frozenset[int] = frozenset()) -> tuple[int, ...]:
        slots = [slot for slot in range(count) if slot not in without]
        return tuple(self.random.sample(slots, self.random.randint(1, most)))

    def step(self) -> None:
        chance, out, into = self.random.random, NO_EVICT, NO_SWAP_IN
        if chance() < 0.5:
            sources = self.some(DEVICE_SLOTS, 3)
            out = evict(sources, tuple(self.random.sample(range(HOST_SLOTS), len(sources))))
        if chance() < 0.5:
            sources = self.some(HOST_SLOTS, 3)
            into = swap_in(sources, tuple(self.random.sample(range(DEVICE_SLOTS), len(sources))))
        counter = self.rig.submit(out, into)
        for source, target in zip(out.source_slots, out.target_slots, strict=True):
            self.host[target] = self.device[source]
        swapped = [
            (self.host[source], target) for source, target in zip(into.source_slots, into.target_slots, strict=True)
        ]
        for content, target in swapped:
            self.device[target] = content
        if chance() < 0.7:
            self.compute(counter, frozenset(into.target_slots))

    def compute(self, counter: LayerDoneCounter | None, arriving: frozenset[int]) -> None:
        """A forward pass: per layer wait, write the new tokens' blocks, then read the block table."""
        controller, stream = self.rig.controller, self.rig.runtime.compute_stream
        writes = self.some(DEVICE_SLOTS, 2, arriving) if self.random.random() < 0.7 else ()
        reads = frozenset(self.some(DEVICE_SLOTS, 4)) | frozenset(self.random.sample(writes, len(writes) // 2))
        for slot in writes:
            self.contents += 1
            self.device[slot] = self.contents
        expected = {slot: self.device[slot] for slot in reads}
        written = {slot: self.device[slot] for slot in writes}
        if counter is not None and self.random.random() < 0.3:
            counter = None  # somebody dropped it: before_compute must cover its swap-in
        controller.before_compute(reads, writes, counter=counter)
        for layer in range(self.rig.layout.num_layers):
            if counter is not None:
                counter.wait_for_layer(layer)
            stream.submit(self.forward, layer, written, expected)
        unknown = self.unknown_slots and self.random.random() < 0.1
        controller.after_compute(None if unknown else reads, None if unknown else writes)

    def forward(self, layer: int, written: dict[int, int], expected: dict[int, int]) -> None:
        reads = [("device", layer, slot) for slot in expected]
        writes = [("device", layer, slot) for slot in written]
        with self.recorder.access(Actor.COMPUTE, reads, writes):
            self.pause(Actor.COMPUTE)
            for slot, content in written.items():
                self.rig.write(layer, slot, content)
            for slot, content in expected.items():
                if not self.rig.holds(layer, slot, content):
                    self.recorder.fault(f"compute read wrong bytes in layer {layer} slot {slot}")

    def settle(self) -> None:
        self.rig.controller.drain()
        self.rig.runtime.compute_stream.synchronize()
        self.rig.controller.check()

    def verify_everything(self) -> None:
        """With all streams idle, every slot of both tiers holds what the model says."""
        for slot, content in enumerate(self.device):
            if not self.rig.holds_all(slot, content):
                self.recorder.fault(f"device slot {slot} does not hold {content}")
        self.rig.submit(into=swap_in(tuple(range(HOST_SLOTS)), tuple(range(DEVICE_SLOTS))))
        self.device = list(self.host)
        self.settle()
        for slot, content in enumerate(self.device):
            if not self.rig.holds_all(slot, content):
                self.recorder.fault(f"host slot {slot} did not hold {content}")


def random_pauses(seed: int) -> Callable[[Actor], None]:
    """Mostly none, sometimes up to 0.4 ms, on every stream."""
    source = random.Random(seed)

    def pause(actor: Actor) -> None:
        if source.random() < 0.15:
            time.sleep(source.random() * 0.0004)

    return pause


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_steps_read_right_and_never_overlap(seed: int) -> None:
    path = DataPath(seed, random_pauses(seed), unknown_slots=True)
    with path.instrumented():
        results = [result for number in range(1, 3001) for result in step_and_look(path, number)]
        path.settle()
    assert path.recorder.faults == []
    assert len(results) > 2000
    assert all(result.ok for result in results)
    assert path.recorder.accesses > 8000
    path.rig.close()


def step_and_look(path: DataPath, number: int) -> list[TransferResult]:
    controller = path.rig.controller
    path.step()
    results = controller.take_results()
    if number % 60 == 0:
        path.settle()
        assert path.recorder.faults == []
    if number % 240 == 0:
        path.verify_everything()
        results += controller.take_results()
        controller.reset()
        controller.check()
    return results


Rule = tuple[str, Actor, Actor, Hazard]

RULES: list[Rule] = [
    # tier, the later use, waits for the earlier use, because
    ("device", Actor.OUTPUT, Actor.COMPUTE, Hazard.READ_AFTER_WRITE),
    ("device", Actor.OUTPUT, Actor.INPUT, Hazard.READ_AFTER_WRITE),
    ("device", Actor.INPUT, Actor.COMPUTE, Hazard.WRITE_AFTER_READ),
    ("device", Actor.INPUT, Actor.COMPUTE, Hazard.WRITE_AFTER_WRITE),
    ("device", Actor.INPUT, Actor.OUTPUT, Hazard.WRITE_AFTER_READ),
    ("device", Actor.COMPUTE, Actor.OUTPUT, Hazard.WRITE_AFTER_READ),
    ("device", Actor.COMPUTE, Actor.INPUT, Hazard.READ_AFTER_WRITE),
    ("device", Actor.COMPUTE, Actor.INPUT, Hazard.WRITE_AFTER_WRITE),
    ("host", Actor.INPUT, Actor.OUTPUT, Hazard.READ_AFTER_WRITE),
    ("host", Actor.OUTPUT, Actor.INPUT, Hazard.WRITE_AFTER_READ),
]


def slow(slowest: Actor) -> Callable[[Actor], None]:
    """The earlier use is slow, everybody else is fast: who does not wait is early for certain."""

    def pause(actor: Actor) -> None:
        if actor is slowest:
            time.sleep(0.002)

    return pause


def run_until_fault(path: DataPath, steps: int) -> list[str]:
    with path.instrumented():
        for number in range(1, steps + 1):
            path.step()
            if number % 20 == 0:
                path.settle()
                if path.recorder.faults:
                    break
        path.settle()
    path.rig.close()
    return path.recorder.faults


@pytest.mark.parametrize(
    "rule", RULES, ids=lambda rule: f"{rule[0]}-{rule[1].value}-after-{rule[2].value}-{rule[3].value}"
)
def test_dropping_a_rule_is_detected(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, later, earlier, hazard = rule
    complete = SlotTable.conflicts
    dropped = 0

    def without_the_rule(self: SlotTable, actor: Actor, reads, writes) -> Iterator[Dependency]:  # type: ignore[no-untyped-def]
        nonlocal dropped
        for dependency in complete(self, actor, reads, writes):
            if (self.name, dependency.later, dependency.earlier, dependency.hazard) == (tier, later, earlier, hazard):
                dropped += 1
            else:
                yield dependency

    monkeypatch.setattr(SlotTable, "conflicts", without_the_rule)
    path = DataPath(7, slow(earlier), unknown_slots=False)
    assert run_until_fault(path, 1000), f"{dropped} waits were dropped and nobody noticed"
    assert dropped > 0


def test_not_waiting_for_layers_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LayerDoneCounter, "wait_for_layer", lambda self, layer, timeout=None: None)
    path = DataPath(7, slow(Actor.INPUT), unknown_slots=False)
    assert run_until_fault(path, 1000)


@pytest.mark.parametrize("slowest", list(Actor))
def test_all_rules_together_hold_with_one_slow_stream(slowest: Actor) -> None:
    """The same steps and speeds as above, with nothing taken away."""
    path = DataPath(7, slow(slowest), unknown_slots=False)
    assert run_until_fault(path, 100) == []
