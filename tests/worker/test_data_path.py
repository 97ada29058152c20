"""The data path under random delays: what attention reads is right, and nobody touches a slot while it is written.

Random steps go to a controller whose copy and compute streams are threads that run at random speeds. A sequential
model says what every slot holds after each step; the compute thread compares what it reads with it, byte for byte.
Every access records when it begins and ends, so that two conflicting ones at a time are seen even if the bytes happen
to be right. To show that this test sees what it should, every rule of the hazard table is then taken away once.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

import pytest

from fastdeploy_kvcache_v1.worker.hazards import Actor, Dependency, Hazard, HazardTable
from fastdeploy_kvcache_v1.worker.layer_done_counter import LayerDoneCounter
from fastdeploy_kvcache_v1.worker.runtime import CpuRuntime
from tests.worker.data_path import DEVICE_SLOTS, HOST_SLOTS, DataPath
from tests.worker.worker_fakes import Rig

pytestmark = pytest.mark.usefixtures("cpu_ops")


def threaded_path(seed: int, pause: Callable[[Actor], None], *, unknown_slots: bool) -> DataPath:
    """Copies and compute on threads of their own."""
    runtime = CpuRuntime(threaded_compute=True)
    rig = Rig(runtime, device=DEVICE_SLOTS, host=HOST_SLOTS)
    return DataPath(seed, rig, pause, runtime.compute_stream.submit, unknown_slots=unknown_slots)


def random_pauses(seed: int) -> Callable[[Actor], None]:
    """Mostly none, sometimes up to 0.4 ms, on every stream."""
    source = random.Random(seed)

    def pause(actor: Actor) -> None:
        if source.random() < 0.15:
            time.sleep(source.random() * 0.0004)

    return pause


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_steps_read_right_and_never_overlap(seed: int) -> None:
    path = threaded_path(seed, random_pauses(seed), unknown_slots=True)
    with path.instrumented():
        results = [result for number in range(1, 3001) for result in path.step_and_look(number)]
        path.settle()
    assert path.recorder.faults == []
    assert len(results) > 2000
    assert all(result.ok for result in results)
    assert path.recorder.accesses > 8000
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
    path = threaded_path(7, slow(earlier), unknown_slots=False)
    assert run_until_fault(path, 5000), f"{dropped} waits were dropped and nobody noticed"
    assert dropped > 0


def test_not_waiting_for_layers_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LayerDoneCounter, "wait_for_layer", lambda self, layer, timeout=None: None)
    path = threaded_path(7, slow(Actor.INPUT), unknown_slots=False)
    assert run_until_fault(path, 5000)


@pytest.mark.parametrize("slowest", list(Actor))
def test_all_rules_together_hold_with_one_slow_stream(slowest: Actor) -> None:
    """The same steps and speeds as above, with nothing taken away."""
    path = threaded_path(7, slow(slowest), unknown_slots=False)
    assert run_until_fault(path, 100) == []
