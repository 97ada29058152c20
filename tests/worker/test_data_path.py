"""The data path whatever stream runs first: what attention reads is right.

Random steps go to a controller whose streams a seed runs, operation by operation, as far as their waits allow. A
sequential model says what every slot holds after each step, and each pass compares what it reads with it, byte for
byte. `tests/mutation/test_ordering.py` shows what a forgotten wait does.
"""

from __future__ import annotations

import random

import pytest

from fastdeploy_kvcache_v1.metadata import NO_EVICT, NO_SWAP_IN
from tests.worker.worker_fakes import Rig, evict, swap_in
from tests.world.clock import Clock
from tests.world.streams import VirtualDevice

SLOTS = range(8)
"""Of either tier."""


class Device(VirtualDevice):
    """After each step it runs some operations; those of a `slowest` stream come where no other one can run."""

    def __init__(self, rng: random.Random, slowest: str = "") -> None:
        super().__init__(Clock())
        self.random, self.slowest = rng, slowest

    def go_on(self) -> None:
        if not self.slowest:
            self.run_some(self.random, 30)
            return
        while any(stream.run() for stream in self.streams if stream.name != self.slowest):
            pass
        for stream in self.streams:
            if stream.name == self.slowest and self.random.random() < 0.5:
                stream.run()


class DataPath(Rig):
    """The sequential model and the random steps. With `unknown_slots` some passes do not say what they used."""

    def __init__(self, seed: int, slowest: str = "", *, unknown_slots: bool = False) -> None:
        self.random, self.unknown_slots = random.Random(seed), unknown_slots
        super().__init__(Device(self.random, slowest), device=len(SLOTS), host=len(SLOTS))
        for slot in SLOTS:
            self.controller.host_pool.block(slot)[:] = 0
        self.on_device, self.on_host, self.contents = [0] * len(SLOTS), [0] * len(SLOTS), 0

    def some(self, most: int, without: frozenset[int] = frozenset()) -> tuple[int, ...]:
        slots = [slot for slot in SLOTS if slot not in without]
        return tuple(self.random.sample(slots, self.random.randint(1, most)))

    def step(self) -> None:
        chance, out, into = self.random.random, NO_EVICT, NO_SWAP_IN
        if chance() < 0.5:
            sources = self.some(3)
            out = evict(sources, tuple(self.random.sample(SLOTS, len(sources))))
        if chance() < 0.5:
            sources = self.some(3)
            into = swap_in(sources, tuple(self.random.sample(SLOTS, len(sources))))
        counter = self.submit(out, into)
        for source, target in zip(out.source_slots, out.target_slots, strict=True):
            self.on_host[target] = self.on_device[source]
        for source, target in zip(into.source_slots, into.target_slots, strict=True):
            self.on_device[target] = self.on_host[source]
        if chance() < 0.7:
            self.compute(counter, frozenset(into.target_slots))
        self.runtime.go_on()

    def compute(self, counter, arriving: frozenset[int]) -> None:
        """A forward pass: per layer wait, write the new tokens' blocks, then read the block table."""
        writes = self.some(2, arriving) if self.random.random() < 0.7 else ()
        reads = frozenset(self.some(4)) | frozenset(self.random.sample(writes, len(writes) // 2))
        for slot in writes:
            self.contents += 1
            self.on_device[slot] = self.contents
        written = {slot: self.on_device[slot] for slot in writes}
        expected = {slot: self.on_device[slot] for slot in reads}
        self.controller.before_compute(reads, writes, counter=counter)
        for layer in range(self.layout.num_layers):
            if counter is not None:
                counter.wait_for_layer(layer)
            self.runtime.compute_stream.submit(self.forward, layer, written, expected)
        unknown = self.unknown_slots and self.random.random() < 0.1
        self.controller.after_compute(None if unknown else reads, None if unknown else writes)

    def forward(self, layer: int, written: dict[int, int], expected: dict[int, int]) -> None:
        for slot, content in written.items():
            self.write(layer, slot, content)
        for slot, content in expected.items():
            assert self.holds(layer, slot, content), f"compute read wrong bytes in layer {layer} slot {slot}"

    def settle(self) -> None:
        self.controller.drain()
        self.runtime.compute_stream.synchronize()
        self.controller.check()

    def verify_everything(self) -> None:
        """With all streams idle, every slot of both tiers holds what the model says."""
        self.settle()
        assert [slot for slot in SLOTS if not self.holds_all(slot, self.on_device[slot])] == []
        self.submit(into=swap_in(tuple(SLOTS), tuple(SLOTS)))
        self.on_device = list(self.on_host)
        self.settle()
        assert [slot for slot in SLOTS if not self.holds_all(slot, self.on_device[slot])] == []


@pytest.mark.parametrize("seed", range(8))
def test_random_steps_read_right_whatever_stream_runs_first(seed: int) -> None:
    path, results = DataPath(seed, unknown_slots=True), []
    for number in range(1, 601):
        path.step()
        results += path.controller.take_results()
        if number % 60 == 0:
            path.settle()
        if number % 240 == 0:
            path.verify_everything()
            results += path.controller.take_results()
            path.controller.reset()
            path.controller.check()
    path.settle()
    assert len(results) > 350
    assert all(result.ok for result in results)
    path.close()


@pytest.mark.parametrize("slowest", ["compute", "kv-input", "kv-output"])
def test_no_stream_is_too_slow(slowest: str) -> None:
    path = DataPath(7, slowest)
    for number in range(1, 301):
        path.step()
        if number % 20 == 0:
            path.verify_everything()
    path.close()
