"""CacheController and CacheTransferManager: order within and across steps, failures, timeouts."""

from __future__ import annotations

import pytest

from fastdeploy_kvcache_v1.errors import (
    CacheStateError,
    LayerSwapTimeoutError,
    TransferError,
)
from fastdeploy_kvcache_v1.metadata import NO_EVICT, NO_SWAP_IN, CacheLevel, SwapStep
from fastdeploy_kvcache_v1.worker import ops
from fastdeploy_kvcache_v1.worker.ops import CopyRun
from fastdeploy_kvcache_v1.worker.runtime import CpuRuntime
from fastdeploy_kvcache_v1.worker.slot_set import SlotSet
from tests.worker.worker_fakes import LIMIT_S, Gates, Rig, evict, swap_in
from tests.world.clock import Clock
from tests.world.streams import VirtualDevice

pytestmark = pytest.mark.usefixtures("cpu_ops")

INPUT, OUTPUT = "kv-input", "kv-output"


@pytest.fixture
def gates():
    return Gates()


@pytest.fixture
def rig(gates):
    rig = Rig(CpuRuntime(delay=gates))
    for slot in range(rig.num_device):
        rig.write_all(slot, 10 + slot)
    yield rig
    rig.close()


def arrived(gates) -> None:
    assert gates.reached.acquire(timeout=LIMIT_S)


def outcomes(rig) -> list[tuple[int, CacheLevel, bool]]:
    return [(result.step, result.target, result.ok) for result in rig.controller.take_results()]


# ---- order


def test_a_round_trip_over_the_host(rig):
    assert rig.submit(evict((0, 1, 2), (5, 3, 4))) is None
    counter = rig.submit(into=swap_in((4, 5), (3, 0)))
    assert counter is not None
    assert counter.target_slots == {3, 0}
    counter.wait_all()
    assert rig.holds_all(3, 12)
    assert rig.holds_all(0, 10)
    assert rig.holds_all(1, 11)
    rig.controller.drain(LIMIT_S)
    first, second = rig.controller.take_results()
    block = rig.layout.block_bytes
    assert (first.step, first.source, first.target) == (1, CacheLevel.DEVICE, CacheLevel.HOST)
    assert (first.num_blocks, first.num_bytes, first.target_slots, first.error) == (3, 3 * block, (), None)
    assert (second.step, second.source, second.target) == (2, CacheLevel.HOST, CacheLevel.DEVICE)
    assert (second.num_blocks, second.num_bytes) == (2, 2 * block)
    assert rig.controller.take_results() == []
    assert rig.controller.num_unreported_copies == 0
    assert min(first.seconds, second.seconds) > 0
    assert rig.controller.copy_progress().ended == 2


def test_blocks_go_out_and_back_between_trailers(gates):
    rig = Rig(CpuRuntime(delay=gates), trailer_bytes=64)
    for slot in range(rig.num_device):
        rig.write_all(slot, 10 + slot)
    pool = rig.controller.host_pool
    for slot in range(rig.num_host):
        pool.slot(slot)[-64:] = 100 + slot
    rig.submit(evict((0, 1, 2, 5), (1, 2, 3, 0)))
    rig.submit(into=swap_in((2, 3, 0, 1), (0, 1, 2, 5))).wait_all()
    assert [rig.holds_all(slot, content) for slot, content in ((0, 11), (1, 12), (2, 15), (5, 10))] == [True] * 4
    assert all((pool.slot(slot)[-64:] == 100 + slot).all() for slot in range(rig.num_host))
    rig.close()


def test_neighbours_on_both_sides_are_copied_at_once(rig, monkeypatch):
    copied = []
    for op in ("swap_cache_all_layers", "swap_cache_per_layer"):
        monkeypatch.setattr(ops, op, lambda to, of, runs, *, stream=0, op=op: copied.append((op, list(runs))))
    rig.submit(evict((2, 0, 1, 4), (4, 2, 3, 5)), swap_in((0, 1), (3, 5)))
    rig.controller.drain(LIMIT_S)
    evicted = [("swap_cache_all_layers", [CopyRun(0, 2, 3), CopyRun(4, 5, 1)])]
    swapped_in = [("swap_cache_per_layer", [CopyRun(0, 3, 1), CopyRun(1, 5, 1)])]
    assert sorted(copied) == evicted + swapped_in * rig.layout.num_layers


def test_one_step_evicts_a_slot_and_swaps_into_it(rig, gates):
    open_gate = gates.close(OUTPUT)
    counter = rig.submit(evict((0,), (2,)), swap_in((2,), (1,)))
    arrived(gates)
    assert counter.num_layers_done == 0, "its source is what the same step evicts"
    open_gate()
    counter.wait_all()
    assert rig.holds_all(1, 10)
    open_gate = gates.close(OUTPUT)
    rig.submit(evict((4,), (0,)))
    counter = rig.submit(evict((5,), (1,)), swap_in((2,), (5,)))
    arrived(gates)
    assert rig.holds_all(5, 15), "the old content is still to be copied"
    open_gate()
    counter.wait_all()
    assert rig.holds_all(5, 10)
    rig.submit(into=swap_in((1, 0), (2, 3))).wait_all()
    assert rig.holds_all(2, 15)
    assert rig.holds_all(3, 14)


def test_a_slow_swap_out_does_not_delay_an_unrelated_swap_in(rig, gates):
    rig.submit(evict((0,), (0,)))
    rig.controller.drain(LIMIT_S)
    open_gate = gates.close(OUTPUT)
    rig.submit(evict((1,), (1,)))
    arrived(gates)
    counter = rig.submit(into=swap_in((0,), (5,)))
    counter.wait_all(LIMIT_S)
    assert rig.holds_all(5, 10)
    done = []
    while len(done) < 2:  # the result follows the last layer; the test's own timeout ends a swap-in that hangs
        done += outcomes(rig)
    assert done == [(1, CacheLevel.HOST, True), (3, CacheLevel.DEVICE, True)]
    open_gate()


def test_a_slow_swap_in_does_not_delay_an_unrelated_swap_out(rig, gates):
    open_gate = gates.close(INPUT)
    counter = rig.submit(into=swap_in((0,), (5,)))
    arrived(gates)
    rig.submit(evict((1,), (1,)))
    done = []
    while not done:  # the test's own timeout ends a swap-out that hangs behind the swap-in
        done = outcomes(rig)
    assert done == [(2, CacheLevel.HOST, True)]
    assert counter.num_layers_done == 0
    open_gate()


def test_layers_arrive_one_by_one(rig, gates):
    rig.submit(evict((0,), (0,)))
    rig.controller.drain(LIMIT_S)
    steps = []

    def one_layer(stream: str) -> None:
        if stream == INPUT:
            steps.append(stream)
            if len(steps) == 2:
                gates(stream)

    runtime = CpuRuntime(delay=one_layer)
    other = Rig(runtime)
    open_gate = gates.close(INPUT)
    counter = other.submit(into=swap_in((0,), (1,)))
    counter.wait_for_layer(0)
    counter.wait_for_layer(0)
    arrived(gates)
    assert (counter.num_layers, counter.num_layers_done) == (3, 1)
    counter.check()
    open_gate()
    counter.wait_for_layer(2)
    assert counter.num_layers_done == 3
    counter.check()
    with pytest.raises(CacheStateError, match="layer 3"):
        counter.wait_for_layer(3)
    other.close()


def test_compute_waits_for_a_copy_that_reads_what_it_writes(gates):
    rig = Rig(CpuRuntime(delay=gates), timeout_s=0.001)
    open_gate = gates.close(OUTPUT)
    rig.submit(evict((1,), (1,)))
    arrived(gates)
    rig.controller.before_compute([1, 2], [3])
    with pytest.raises(LayerSwapTimeoutError):
        rig.controller.before_compute([], [1])
    assert outcomes(rig) == [], "a swap-out that makes compute wait is late, not lost"
    open_gate()
    rig.controller.drain(LIMIT_S)
    rig.controller.before_compute([], [1])
    assert outcomes(rig) == [(1, CacheLevel.HOST, True)]
    rig.close()


@pytest.mark.parametrize("reads", [True, False])
def test_a_dropped_counter_is_covered_before_compute(rig, gates, reads):
    rig.submit(evict((0,), (0,)))
    open_gate = gates.close(INPUT)
    rig.submit(into=swap_in((0,), (4,)))
    arrived(gates)
    current = rig.submit(into=swap_in((0,), (5,)))
    open_gate()
    rig.controller.before_compute([4, 5] if reads else [5], [] if reads else [4], counter=current)
    assert rig.holds_all(4, 10)
    current.wait_all()
    rig.controller.before_compute(None, None)
    rig.controller.after_compute(None, None)


def test_a_pass_writes_each_layer_as_soon_as_the_eviction_has_read_it():
    device = VirtualDevice(Clock())
    rig, written = Rig(device), []
    rig.write_all(0, 10)
    rig.controller.submit_swap_tasks(SwapStep.of(1, evict((0,), (2,)), NO_SWAP_IN), overwritten=SlotSet.of([0]))
    compute, output = device.streams

    def write(layer):
        rig.write(layer, 0, 20)
        written.append(len(output.waiting))

    waits = rig.controller.before_compute([], [0], by_layer=True)
    assert (waits.num_layers, waits.target_slots) == (rig.layout.num_layers, SlotSet())
    for layer in range(waits.num_layers):
        waits.wait_for_layer(layer)
        compute.submit(write, layer)
    rig.controller.after_compute([], [0])
    while not device.is_idle:
        while compute.run():
            pass
        output.run()
    first, second, third = written
    assert first > second > third, "the copies of later layers were still to come"
    rig.controller.submit_swap_tasks(SwapStep.of(2, NO_EVICT, swap_in((2,), (1,))))
    rig.controller.drain(LIMIT_S)
    assert rig.holds_all(1, 10)
    assert rig.holds_all(0, 20)
    assert rig.controller.copy_progress().ended == 2
    rig.close()


def test_a_copy_that_runs_has_not_ended(rig, gates):
    open_gate = gates.close(INPUT)
    rig.submit(into=swap_in((0,), (4,)))
    arrived(gates)
    assert rig.controller.copy_progress() == (0, 1, False)
    open_gate()


def test_compute_may_not_write_what_is_being_swapped_in(rig):
    counter = rig.submit(into=swap_in((0,), (4,)))
    with pytest.raises(CacheStateError, match=r"slots \[4\] are written while they are being swapped in"):
        rig.controller.before_compute([4], [4], counter=counter)


# ---- failures


def test_a_failed_swap_out_fails_who_reads_it_and_nobody_else(rig, gates):
    gates.fail_next(OUTPUT, OSError("no such page"))
    counter = rig.submit(evict((0, 1), (2, 3)), swap_in((2, 5), (4, 5)))
    good = rig.submit(evict((3,), (0,)), swap_in((0,), (1,)))
    with pytest.raises(TransferError, match="the swap-in of layer 0 failed"):
        counter.wait_for_layer(0)
    with pytest.raises(TransferError):
        counter.wait_all()
    good.wait_all()
    assert rig.holds_all(1, 13)
    assert rig.holds_all(4, 14), "a failed unit copies nothing"
    rig.controller.drain(LIMIT_S)
    results = rig.controller.take_results()
    assert [(r.step, r.target, r.target_slots) for r in results] == [
        (1, CacheLevel.HOST, (2, 3)),
        (1, CacheLevel.DEVICE, (4, 5)),
        (2, CacheLevel.HOST, ()),
        (2, CacheLevel.DEVICE, ()),
    ]
    assert results[0].error == "OSError: no such page"
    assert "no such page" in str(results[1].error)
    assert rig.controller.failed_slots(range(6)) == [4, 5]
    with pytest.raises(TransferError):
        rig.controller.before_compute([4], [])
    rig.controller.before_compute([1, 4], [4])
    rig.controller.after_compute([1, 4], [4])
    assert rig.controller.failed_slots(range(6)) == [5]


def test_a_layer_that_fails_fails_the_layers_after_it(rig, gates):
    calls = []

    def second_layer_fails(stream: str) -> None:
        calls.append(stream)
        if len(calls) == 2:
            raise OSError("ECC")

    other = Rig(CpuRuntime(delay=second_layer_fails))
    counter = other.submit(into=swap_in((0,), (1,)))
    counter.wait_for_layer(0)
    for layer in (1, 2, 1):
        with pytest.raises(TransferError, match="ECC"):
            counter.wait_for_layer(layer)
    counter.check()
    assert len(calls) == 2, "the third layer was not copied any more"
    other.controller.drain(LIMIT_S)
    (result,) = other.controller.take_results()
    assert result.target_slots == (1,)
    other.close()


def test_a_repaired_host_slot_is_good_again(rig, gates):
    gates.fail_next(OUTPUT, OSError("no such page"))
    rig.submit(evict((0,), (2,)))
    rig.submit(evict((1,), (2,)))
    rig.submit(into=swap_in((2,), (5,))).wait_all()
    assert rig.holds_all(5, 11)


# ---- timeouts


def test_a_late_layer_is_reported_once_and_stays_in_order(rig, gates):
    rig.submit(evict((0,), (0,)))
    rig.controller.drain(LIMIT_S)
    open_gate = gates.close(INPUT)
    counter = rig.submit(into=swap_in((0,), (4,)))
    arrived(gates)
    with pytest.raises(LayerSwapTimeoutError, match=r"layer 1 did not arrive within 0.001 s"):
        counter.wait_for_layer(1, timeout=0.001)
    for again in (0, 1, 2):
        with pytest.raises(LayerSwapTimeoutError):
            counter.wait_for_layer(again)
    reports = [r for r in rig.controller.take_results() if not r.ok]
    assert [(r.step, r.target_slots) for r in reports] == [(2, (4,))]
    rig.controller.check()
    assert rig.controller.failed_slots([3, 4]) == [4]

    # The late copy still runs into slot 4: whoever uses the slot next comes after it.
    rig.submit(evict((1,), (1,)))
    late = rig.submit(evict((4,), (2,)))
    assert late is None
    with pytest.raises(LayerSwapTimeoutError):
        rig.controller.drain(0.001)
    assert [result.step for result in rig.controller.take_results() if result.step == 4] == []
    open_gate()
    rig.controller.before_compute([], [4])
    assert counter.num_layers_done == 3
    rig.controller.drain(LIMIT_S)
    assert [(r.step, r.ok) for r in rig.controller.take_results()][-1] == (4, True)
    assert rig.controller.take_results() == []
    rig.controller.after_compute([], [4])
    assert rig.controller.failed_slots([4]) == []


def test_a_wait_before_compute_that_takes_too_long_fails_the_swap_in(gates):
    rig = Rig(CpuRuntime(delay=gates), timeout_s=0.001)
    open_gate = gates.close(INPUT)
    rig.submit(into=swap_in((0,), (4,)))
    with pytest.raises(LayerSwapTimeoutError):
        rig.controller.before_compute([4], [])
    (result,) = rig.controller.take_results()
    assert result.target_slots == (4,)
    rig.controller.before_compute([3], [2])
    with pytest.raises(LayerSwapTimeoutError):
        rig.controller.free()
    with pytest.raises(LayerSwapTimeoutError):
        rig.controller.reset()
    rig.controller.check()
    open_gate()
    rig.controller.drain(LIMIT_S)
    assert rig.controller.take_results() == []
    rig.close()


def test_a_swap_in_that_was_reported_good_is_not_given_up_later(rig, gates):
    counter = rig.submit(into=swap_in((0,), (4,)))
    rig.controller.drain(LIMIT_S)
    assert [result.ok for result in rig.controller.take_results()] == [True]
    counter.wait_all(timeout=0)
    assert rig.controller.take_results() == []
