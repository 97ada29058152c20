"""The data path whatever stream runs first: what attention reads is right.

Random steps go to a controller whose streams a seed runs, operation by operation, as far as their waits allow. A
sequential model says what every slot holds after each step, and each pass compares what it reads with it, byte for
byte. To show that this sees what it should, every rule of the hazard table is then taken away once.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from fastdeploy_kvcache_v1.worker.hazards import Actor, Dependency, Hazard, HazardTable
from fastdeploy_kvcache_v1.worker.layer_done_counter import LayerDoneCounter
from tests.worker.data_path import DEVICE_SLOTS, HOST_SLOTS, DataPath
from tests.worker.worker_fakes import Rig
from tests.world.clock import Clock
from tests.world.streams import VirtualDevice

STREAMS = {Actor.COMPUTE: "compute", Actor.INPUT: "kv-input", Actor.OUTPUT: "kv-output"}


class Device(VirtualDevice):
    """After each step it runs some operations; those of a `slowest` stream come where no other one can run."""

    def __init__(self, seed: int, slowest: Actor | None = None) -> None:
        super().__init__(Clock())
        self.random, self.slowest = random.Random(seed), slowest and STREAMS[slowest]

    def go_on(self) -> None:
        if self.slowest is None:
            self.run_some(self.random, 30)
            return
        while any(stream.run() for stream in self.streams if stream.name != self.slowest):
            pass
        for stream in self.streams:
            if stream.name == self.slowest and self.random.random() < 0.5:
                stream.run()


def path_over(device: Device, *, unknown_slots: bool) -> DataPath:
    rig = Rig(device, device=DEVICE_SLOTS, host=HOST_SLOTS)
    for slot in range(HOST_SLOTS):
        rig.controller.host_pool.block(slot)[:] = 0
    return DataPath(7, rig, device.compute_stream.submit, unknown_slots=unknown_slots)


@pytest.mark.parametrize("seed", range(8))
def test_random_steps_read_right_whatever_stream_runs_first(seed: int) -> None:
    device = Device(seed)
    path, results = path_over(device, unknown_slots=True), []
    for number in range(1, 601):
        results += path.step_and_look(number)
        device.go_on()
    path.settle()
    assert path.faults == []
    assert len(results) > 350
    assert all(result.ok for result in results)
    path.rig.close()


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


def faults_in(device: Device, steps: int) -> list[str]:
    path = path_over(device, unknown_slots=False)
    for number in range(1, steps + 1):
        path.step()
        device.go_on()
        if number % 20 == 0:
            path.settle()
            path.verify_everything()
            if path.faults:
                break
    return path.faults


@pytest.mark.parametrize(
    "rule", RULES, ids=lambda rule: f"{rule[0]}-{rule[1].value}-after-{rule[2].value}-{rule[3].value}"
)
def test_dropping_a_rule_is_detected(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, later, earlier, hazard = rule
    complete = HazardTable.conflicts
    dropped = 0

    def without_the_rule(self: HazardTable, actor: Actor, reads, writes) -> Iterator[Dependency]:  # type: ignore[no-untyped-def]
        nonlocal dropped
        for dependency in complete(self, actor, reads, writes):
            if (self.name, dependency.later, dependency.earlier, dependency.hazard) == (tier, later, earlier, hazard):
                dropped += 1
            else:
                yield dependency

    monkeypatch.setattr(HazardTable, "conflicts", without_the_rule)
    assert faults_in(Device(7, slowest=earlier), 2000), f"{dropped} waits were dropped and nobody noticed"
    assert dropped > 0


def test_not_waiting_for_layers_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LayerDoneCounter, "wait_for_layer", lambda self, layer, timeout=None: None)
    assert faults_in(Device(7, slowest=Actor.INPUT), 2000)


@pytest.mark.parametrize("slowest", list(STREAMS))
def test_all_rules_together_hold_with_one_slow_stream(slowest: Actor) -> None:
    """The same steps and speeds as above, with nothing taken away."""
    assert faults_in(Device(7, slowest), 300) == []
