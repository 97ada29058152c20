"""Random steps against a sequential model: the engine of the data-path tests, for any runtime."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator

from fastdeploy_kvcache_v1.metadata import NO_EVICT, NO_SWAP_IN, TransferResult
from fastdeploy_kvcache_v1.worker import ops
from fastdeploy_kvcache_v1.worker.hazards import Actor
from fastdeploy_kvcache_v1.worker.layer_done_counter import LayerDoneCounter
from fastdeploy_kvcache_v1.worker.ops import Implementation, LayerRows
from fastdeploy_kvcache_v1.worker.ops.queues import call_on
from tests.worker.worker_fakes import Rig, evict, swap_in

PLACEHOLDER = Implementation("placeholder", lambda *_: None)

Launch = Callable[..., None]
"""`launch(fn, *args)` runs `fn` in its turn on the compute stream."""

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

    def __init__(
        self, seed: int, rig: Rig, pause: Callable[[Actor], None], launch: Launch, *, unknown_slots: bool
    ) -> None:
        self.random = random.Random(seed)
        self.rig = rig
        self.pause = pause
        self.launch = launch
        self.unknown_slots = unknown_slots
        self.recorder = Recorder()
        self.device = [0] * DEVICE_SLOTS
        self.host = [0] * HOST_SLOTS
        self.contents = 0
        self._where: dict[int, tuple[str, int]] = {}
        for layer in range(self.rig.layout.num_layers):
            self._where[self.rig.arrays[2 * layer].ctypes.data] = ("device", layer)
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
                access = self.recorder.access(actor, reads, writes)
                if not stream:
                    with access:
                        self.pause(actor)
                        run(targets, sources, runs, stream)
                    return

                def enter() -> None:
                    access.__enter__()
                    self.pause(actor)

                self.on_queue(stream, enter)
                run(targets, sources, runs, stream)
                self.on_queue(stream, lambda: access.__exit__(None, None, None))

            return watching

        with contextlib.ExitStack() as undo:
            for op in ("swap_cache_per_layer", "swap_cache_all_layers"):
                original = ops.install(op, "cpu", PLACEHOLDER)
                undo.callback(ops.install, op, "cpu", original)
                ops.install(op, "cpu", Implementation("watched", watched(original.run)))
            yield

    @staticmethod
    def on_queue(queue: int, fn: Callable[[], object]) -> None:
        """Beside a copy that is only enqueued: `fn` takes its turn on the queue."""
        assert ops.COMPILED is not None
        call_on(ops.COMPILED.library, queue, fn)

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
        controller = self.rig.controller
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
            self.launch(self.forward, layer, written, expected)
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

    def step_and_look(self, number: int) -> list[TransferResult]:
        """One step; now and then settle, compare everything with the model, and reset."""
        controller = self.rig.controller
        self.step()
        results = controller.take_results()
        if number % 60 == 0:
            self.settle()
            assert self.recorder.faults == []
        if number % 240 == 0:
            self.verify_everything()
            results += controller.take_results()
            controller.reset()
            controller.check()
        return results
