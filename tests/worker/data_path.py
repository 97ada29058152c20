"""Random steps against a sequential model: the engine of the data-path tests, for any runtime."""

from __future__ import annotations

import random
from collections.abc import Callable

from fastdeploy_kvcache_v1.metadata import NO_EVICT, NO_SWAP_IN, TransferResult
from fastdeploy_kvcache_v1.worker.layer_done_counter import LayerDoneCounter
from tests.worker.worker_fakes import Rig, evict, swap_in

Launch = Callable[..., None]
"""`launch(fn, *args)` runs `fn` in its turn on the compute stream."""

DEVICE_SLOTS, HOST_SLOTS = 8, 8


class DataPath:
    """The rig, the sequential model, and the random steps."""

    def __init__(self, seed: int, rig: Rig, launch: Launch, *, unknown_slots: bool) -> None:
        self.random = random.Random(seed)
        self.rig = rig
        self.launch = launch
        self.unknown_slots = unknown_slots
        self.faults: list[str] = []
        self.device = [0] * DEVICE_SLOTS
        self.host = [0] * HOST_SLOTS
        self.contents = 0

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
        for slot, content in written.items():
            self.rig.write(layer, slot, content)
        for slot, content in expected.items():
            if not self.rig.holds(layer, slot, content):
                self.faults.append(f"compute read wrong bytes in layer {layer} slot {slot}")

    def settle(self) -> None:
        self.rig.controller.drain()
        self.rig.runtime.compute_stream.synchronize()
        self.rig.controller.check()

    def verify_everything(self) -> None:
        """With all streams idle, every slot of both tiers holds what the model says."""
        for slot, content in enumerate(self.device):
            if not self.rig.holds_all(slot, content):
                self.faults.append(f"device slot {slot} does not hold {content}")
        self.rig.submit(into=swap_in(tuple(range(HOST_SLOTS)), tuple(range(DEVICE_SLOTS))))
        self.device = list(self.host)
        self.settle()
        for slot, content in enumerate(self.device):
            if not self.rig.holds_all(slot, content):
                self.faults.append(f"host slot {slot} did not hold {content}")

    def step_and_look(self, number: int) -> list[TransferResult]:
        """One step; now and then settle, compare everything with the model, and reset."""
        controller = self.rig.controller
        self.step()
        results = controller.take_results()
        if number % 60 == 0:
            self.settle()
            assert self.faults == []
        if number % 240 == 0:
            self.verify_everything()
            results += controller.take_results()
            controller.reset()
            controller.check()
        return results
