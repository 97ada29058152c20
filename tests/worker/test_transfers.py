"""CacheController and CacheTransferManager: order within and across steps, failures, timeouts, reports."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

import msgspec
import pytest

from fastdeploy_kvcache_v1.contract.messages import NO_SWAP_IN, NO_SWAP_OUT, CacheLevel, CopyPath
from fastdeploy_kvcache_v1.errors import CacheStateError, LayerSwapTimeoutError, TransferError
from fastdeploy_kvcache_v1.worker import transfer_manager
from fastdeploy_kvcache_v1.worker.ops.copies import CpuCopies
from fastdeploy_kvcache_v1.worker.runtime import CpuRuntime, cpu
from fastdeploy_kvcache_v1.worker.slot_set import NO_SLOTS, slot_set
from tests.worker.chosen_runtime import ChosenEvent
from tests.worker.worker_fakes import Rig, swap_in, swap_out
from tests.world.streams import Clock, VirtualDevice

SWAP_IN, SWAP_OUT = "kv-swap_in", "kv-swap_out"


def outcomes(rig) -> list[tuple[int, CacheLevel, bool]]:
    return [(result.step, result.target, result.ok) for result in rig.controller.transfers.take_results()]


def num_done(counter) -> int:
    return sum(event.done() for event in counter._swap_in)


# ---- order


@pytest.mark.parametrize("trailer_bytes", [0, 64])
def test_a_round_trip_over_the_host(cpu_ops, trailer_bytes):
    """On the threads of a real runtime. What stands behind the blocks of the host stays."""
    rig = Rig(CpuRuntime(), trailer_bytes=trailer_bytes)
    rig.fill()
    pool = rig.controller.host_pool
    for slot in range(rig.num_host):
        pool.slot(slot)[rig.layout.block_bytes :] = 100 + slot
    assert rig.submit(swap_out((0, 1, 2), (5, 3, 4))) is None
    counter = rig.submit(into=swap_in((4, 5), (3, 0)))
    assert counter is not None
    assert [*counter.target_slots] == [0, 3]
    counter.wait_all()
    assert [rig.holds(slot, content) for slot, content in ((3, 12), (0, 10), (1, 11))] == [True] * 3
    rig.controller.transfers.drain()
    first, second = rig.controller.transfers.take_results()
    block = rig.layout.block_bytes
    assert (first.step, first.source, first.target) == (1, CacheLevel.DEVICE, CacheLevel.HOST)
    assert (first.num_blocks, first.num_bytes, first.target_slots, first.error) == (3, 3 * block, (), None)
    assert (second.step, second.source, second.target) == (2, CacheLevel.HOST, CacheLevel.DEVICE)
    assert (second.num_blocks, second.num_bytes) == (2, 2 * block)
    assert rig.controller.transfers.take_results() == []
    assert rig.controller.transfers.num_unreported == 0
    assert min(first.seconds, second.seconds) > 0
    assert all((pool.slot(slot)[block:] == 100 + slot).all() for slot in range(rig.num_host))
    rig.close()


@pytest.mark.parametrize(
    ("overwritten", "filled", "by_layer"), [(None, 4, False), (NO_SLOTS, 4, True), (NO_SLOTS, 5, False)]
)
def test_neighbours_on_both_sides_are_copied_at_once(rig, monkeypatch, overwritten, filled, by_layer):
    """Layer by layer where it is said what is written soon: what the same step fills is."""
    copied = []
    for name in ("all_layers", "layer"):

        def copy(self, *given, op=name):
            copied.append((op, list(given[-2])))

        monkeypatch.setattr(CpuCopies, name, copy)
    rig.submit(swap_out((2, 0, 1, 4), (4, 2, 3, 5)), swap_in((0, 1), (filled, 3)), overwritten=overwritten)
    rig.controller.transfers.drain()
    op, times = ("layer", rig.layout.num_layers) if by_layer else ("all_layers", 1)
    evicted = [(op, [[0, 2, 3], [4, 5, 1]])] * times
    swapped_in = [("layer", [[0, filled, 1], [1, 3, 1]])] * rig.layout.num_layers
    assert sorted(copied) == evicted + swapped_in


@pytest.mark.parametrize(
    ("slow", "first", "second", "done"),
    [
        (
            SWAP_OUT,
            (swap_out((1,), (1,)), NO_SWAP_IN),
            (NO_SWAP_OUT, swap_in((0,), (5,))),
            [(3, CacheLevel.DEVICE, True)],
        ),
        (SWAP_IN, (NO_SWAP_OUT, swap_in((0,), (5,))), (swap_out((1,), (1,)), NO_SWAP_IN), [(3, CacheLevel.HOST, True)]),
    ],
)
def test_a_slow_copy_does_not_delay_an_unrelated_one_the_other_way(rig, slow, first, second, done):
    rig.submit(swap_out((0,), (0,)))
    rig.controller.transfers.drain()
    assert outcomes(rig) == [(1, CacheLevel.HOST, True)]
    let_go = rig.runtime.hold(slow)
    rig.submit(*first)
    rig.submit(*second)
    while rig.runtime.go_on():
        pass
    assert outcomes(rig) == done
    assert rig.controller.transfers.num_unreported == 1, "what runs has not ended"
    let_go()


def test_layers_arrive_one_by_one(rig):
    counter = rig.submit(into=swap_in((0,), (1,)))
    for layer in range(3):
        assert (counter.num_layers, num_done(counter)) == (3, layer)
        counter.wait_for_layer(layer)
        counter.wait_for_layer(layer)
        counter.check()
    for layer in (3, -1):
        with pytest.raises(CacheStateError, match=rf"layer {layer} is not in \[0, 3\)"):
            counter.wait_for_layer(layer)


def test_a_pass_writes_each_layer_as_soon_as_the_eviction_has_read_it():
    device = VirtualDevice(Clock())
    rig, written = Rig(device), []
    rig.write(0, 10)
    rig.submit(swap_out((0,), (2,)), overwritten=slot_set([0]))
    compute, output = device.streams

    def write(layer):
        rig.write(0, 20, layer)
        written.append(len(output.waiting))

    waits = rig.controller.transfers.before_compute([], [0], by_layer=True)
    assert (waits.num_layers, waits.target_slots) == (rig.layout.num_layers, NO_SLOTS)
    for layer in range(waits.num_layers):
        waits.wait_for_layer(layer)
        compute.submit(write, layer)
    rig.controller.transfers.after_compute([], [0])
    while not device.is_idle:
        while compute.run():
            pass
        output.run()
    first, second, third = written
    assert first > second > third, "the copies of later layers were still to come"
    rig.submit(into=swap_in((2,), (1,)))
    rig.controller.transfers.drain()
    assert rig.holds(1, 10)
    assert rig.holds(0, 20)
    rig.close()


def test_a_layer_of_a_slot_is_filled_when_it_has_been_evicted():
    device = VirtualDevice(Clock())
    rig = Rig(device)
    rig.write(0, 10)
    rig.submit(swap_out((0,), (2,)), swap_in((3,), (0,)), overwritten=slot_set([0]))
    compute, output, into = device.streams
    while not device.is_idle:
        while compute.run() or into.run():
            pass
        output.run()
    rig.submit(into=swap_in((2,), (1,)))
    rig.controller.transfers.drain()
    assert rig.holds(1, 10)
    rig.close()


def test_pass_waits_by_layer_for_its_swap_in_and_for_overwritten_slots(rig):
    counter = rig.submit(swap_out((0,), (2,)), swap_in((3,), (1,)), overwritten=slot_set([0]))
    waits = rig.controller.transfers.before_compute([1], [0], counter=counter, by_layer=True)
    assert [*waits.target_slots] == [1]
    waits.wait_all()
    assert num_done(counter) == 3
    rig.controller.transfers.drain()
    waits = rig.controller.transfers.before_compute([1], [0], counter=counter, by_layer=True)
    assert waits is counter, "there is nothing else"
    let_go = rig.runtime.hold(SWAP_OUT)
    rig.submit(swap_out((4,), (4,)), overwritten=slot_set([4]))
    waits = rig.controller.transfers.before_compute([], [4], by_layer=True)
    with pytest.raises(LayerSwapTimeoutError):
        waits.wait_for_layer(0)
    let_go()
    waits.wait_all()


def test_compute_may_not_write_slots_that_are_being_swapped_in(rig):
    counter = rig.submit(into=swap_in((0,), (4,)))
    with pytest.raises(CacheStateError, match=r"slots \[4\] are written while they are being swapped in"):
        rig.controller.transfers.before_compute([4], [4], counter=counter)


# ---- failures


def test_failed_swap_out_fails_the_readers_of_its_slots_alone(rig):
    rig.runtime.fail_next(SWAP_OUT, OSError("no such page"))
    counter = rig.submit(swap_out((0, 1), (2, 3)), swap_in((2, 5), (4, 5)))
    good = rig.submit(swap_out((3,), (0,)), swap_in((0,), (1,)))
    with pytest.raises(TransferError, match="the swap-in of layer 0 failed"):
        counter.wait_for_layer(0)
    with pytest.raises(TransferError):
        counter.wait_all()
    good.wait_all()
    assert rig.holds(1, 13)
    assert rig.holds(4, 14), "a failed unit copies nothing"
    rig.controller.transfers.drain()
    results = rig.controller.transfers.take_results()
    assert [(r.step, r.target, r.target_slots) for r in results] == [
        (1, CacheLevel.HOST, (2, 3)),
        (1, CacheLevel.DEVICE, (4, 5)),
        (2, CacheLevel.HOST, ()),
        (2, CacheLevel.DEVICE, ()),
    ]
    assert results[0].error == "OSError: no such page"
    assert "no such page" in str(results[1].error)
    assert rig.controller.transfers.failed_slots(range(6)) == [4, 5]
    with pytest.raises(TransferError):
        rig.controller.transfers.before_compute([4], [])
    rig.controller.transfers.before_compute([1, 4], [4])
    rig.controller.transfers.after_compute([1, 4], [4])
    assert rig.controller.transfers.failed_slots(range(6)) == [5]


def test_a_layer_that_fails_fails_the_layers_after_it(rig):
    counter = rig.submit(into=swap_in((0,), (1,)))
    counter.wait_for_layer(0)
    rig.runtime.fail_next(SWAP_IN, OSError("ECC"))
    rig.runtime.fail_next(SWAP_IN, AssertionError("the third layer is not copied any more"))
    for layer in (1, 2, 1):
        with pytest.raises(TransferError, match="ECC"):
            counter.wait_for_layer(layer)
    counter.check()
    rig.controller.transfers.drain()
    (result,) = rig.controller.transfers.take_results()
    assert (result.target_slots, result.error) == ((1,), "OSError: ECC")


def test_device_slot_whose_copy_failed_can_be_read_once_filled_again(rig):
    def reads(slot):
        rig.controller.transfers.before_compute([slot], [])
        rig.controller.transfers.after_compute([slot], [])

    rig.runtime.fail_next(SWAP_IN, RuntimeError("ECC"))
    rig.submit(into=swap_in((0, 1), (2, 3)))
    rig.controller.transfers.drain()
    with pytest.raises(TransferError):
        reads(2)
    rig.controller.transfers.refilled((2,))
    reads(2)
    with pytest.raises(TransferError):
        reads(3)
    assert rig.controller.transfers.failed_slots([2, 3]) == [3]
    rig.submit(into=swap_in((5,), (3,)))
    rig.controller.transfers.drain()
    reads(3)


def test_host_slot_whose_copy_failed_can_be_read_once_a_step_says_refilled(rig):
    def reads(slot, refilled=()):
        rig.submit(into=swap_in((slot,), (slot,)), refilled=refilled).wait_all()

    rig.runtime.fail_next(SWAP_OUT, RuntimeError("ECC"))
    rig.submit(swap_out((0, 1), (2, 3)))
    rig.controller.transfers.drain()
    with pytest.raises(TransferError):
        reads(2)
    reads(2, refilled=(2,))
    with pytest.raises(TransferError):
        reads(3)
    rig.submit(swap_out((0,), (3,)))
    rig.controller.transfers.drain()
    reads(3)


def test_copy_that_fails_in_the_step_that_says_refilled_stays_failed(rig):
    rig.runtime.fail_next(SWAP_OUT, RuntimeError("ECC"))
    rig.submit(swap_out((0,), (2,)), refilled=(2,))
    rig.controller.transfers.drain()
    with pytest.raises(TransferError):
        rig.submit(into=swap_in((2,), (2,))).wait_all()


# ---- timeouts


def test_a_late_layer_is_reported_once_and_stays_in_order(rig):
    rig.submit(swap_out((0,), (0,)))
    rig.controller.transfers.drain()
    let_go = rig.runtime.hold(SWAP_IN)
    counter = rig.submit(into=swap_in((0,), (4,)))
    assert rig.controller.transfers.late_writes([4]) == [], "nobody has given it up"
    with pytest.raises(LayerSwapTimeoutError, match=r"layer 1 did not arrive within 0.001 s"):
        counter.wait_for_layer(1, timeout=0.001)
    for again in (0, 1, 2):
        with pytest.raises(LayerSwapTimeoutError):
            counter.wait_for_layer(again)
    reports = [r for r in rig.controller.transfers.take_results() if not r.ok]
    assert [(r.step, r.target_slots) for r in reports] == [(2, (4,))]
    rig.controller.check()
    assert rig.controller.transfers.failed_slots([3, 4]) == [4]
    assert rig.controller.transfers.late_writes([3, 5]) == []
    (copy,) = rig.controller.transfers.late_writes([3, 4])
    assert not copy.done()

    # The late copy still runs into slot 4: whoever uses the slot next comes after it.
    rig.submit(swap_out((1,), (1,)))
    assert rig.submit(swap_out((4,), (2,))) is None
    with pytest.raises(LayerSwapTimeoutError, match=r"the copies of step 2 were not done within 0\.001 s"):
        rig.controller.transfers.drain(0.001)
    assert [result.step for result in rig.controller.transfers.take_results() if result.step == 4] == []
    let_go()
    rig.controller.transfers.before_compute([], [4])
    assert num_done(counter) == 3
    rig.controller.transfers.drain()
    assert rig.controller.transfers.late_writes([4]) == []
    assert outcomes(rig)[-1:] == [(4, CacheLevel.HOST, True)]
    assert rig.controller.transfers.take_results() == []
    rig.controller.transfers.after_compute([], [4])
    assert rig.controller.transfers.failed_slots([4]) == []


def test_a_wait_before_compute_that_takes_too_long_fails_the_swap_in(rig):
    let_go = rig.runtime.hold(SWAP_IN)
    rig.submit(into=swap_in((0,), (4,)))
    with pytest.raises(LayerSwapTimeoutError):
        rig.controller.transfers.before_compute([4], [])
    (result,) = rig.controller.transfers.take_results()
    assert result.target_slots == (4,)
    rig.controller.transfers.before_compute([3], [2])
    with pytest.raises(LayerSwapTimeoutError):
        rig.controller.free()
    rig.controller.check()
    let_go()
    rig.controller.transfers.drain()
    assert rig.controller.transfers.take_results() == []


# ---- reports


def test_a_copy_that_was_given_up_is_open_as_long_as_it_runs(rig):
    let_go = rig.runtime.hold(SWAP_IN)
    counter = rig.submit(into=swap_in((0,), (4,)))
    with pytest.raises(LayerSwapTimeoutError):
        counter.wait_for_layer(0)
    report = rig.controller.transfers.take_report()
    assert [result.ok for result in report.transfers] == [False]
    assert report.ended_through == 0
    let_go()
    rig.controller.transfers.drain()
    assert rig.controller.transfers.take_report().ended_through == 1


def test_copy_that_ends_while_a_report_is_made_is_in_the_next_report(rig, monkeypatch):
    """Else a copy that failed would count as ended before its failure is told: what it left would be stored."""
    rig.runtime.fail_next(SWAP_OUT, OSError("no such page"))
    rig.submit(swap_out((0,), (0,)))
    result_of = transfer_manager.Transfer.take_result

    def ends_just_after(transfer):
        result = result_of(transfer)
        rig.controller.transfers.drain()
        return result

    monkeypatch.setattr(transfer_manager.Transfer, "take_result", ends_just_after)
    first = rig.controller.transfers.take_report()
    assert (first.transfers, first.ended_through) == ((), 0)
    second = rig.controller.transfers.take_report()
    assert ([result.ok for result in second.transfers], second.ended_through) == ([False], 1)


def test_a_report_says_how_long_compute_stood_still_since_the_last_one(rig, monkeypatch):
    """At copies before a pass, and layer by layer."""
    clock = Clock()
    monkeypatch.setattr(cpu.time, "perf_counter", clock)
    wait_done = ChosenEvent.wait_done

    def takes_a_second(event, timeout=None):
        clock.advance(1)
        return wait_done(event, timeout)

    monkeypatch.setattr(ChosenEvent, "wait_done", takes_a_second)
    rig.submit(into=swap_in((0,), (4,)))
    counter = rig.submit(swap_out((0,), (2,)), swap_in((1,), (5,)), overwritten=slot_set([0]))
    waits = rig.controller.transfers.before_compute([4], [0], counter=counter, by_layer=True)
    assert rig.controller.transfers.take_report().exposed_wait_since_last_s == 1
    waits.wait_for_layer(0)
    assert rig.controller.transfers.take_report().exposed_wait_since_last_s == 2
    assert rig.controller.transfers.take_report().exposed_wait_since_last_s == 0
    rig.controller.free()
    rig.controller.initialize_kv_cache(6, 6)
    assert rig.controller.transfers.take_report().exposed_wait_since_last_s == 0, "what was told of the tensors before"
    assert rig.controller.copies.exposed_wait_total_s == 3


def test_reports_have_the_totals_of_a_rank_across_new_tensors(rig):
    rig.runtime.fail_next(SWAP_IN, OSError("no such page"))
    rig.submit(swap_out((0, 1), (0, 1)), swap_in((5,), (4,)))
    rig.controller.transfers.drain()
    rig.controller.transfers.take_report()
    rig.controller.free()
    rig.controller.initialize_kv_cache(6, 6)
    rig.submit(swap_out((2,), (2,)))
    rig.controller.transfers.drain()
    copies = rig.controller.transfers.take_report().copies
    assert (copies.swap_out.blocks, copies.swap_in.blocks, copies.swap_in.failures) == (3, 0, 1)
    assert copies.swap_out.bytes == 3 * rig.controller.layout.block_bytes


def test_a_report_keeps_its_totals_while_the_worker_goes_on_counting(rig):
    """Another thread may encode it meanwhile: a half-counted copy would be a torn report."""
    reports, wire = [], []
    for number in range(3):
        rig.submit(swap_out((number,), (number,)))
        rig.controller.transfers.drain()
        reports.append(rig.controller.transfers.take_report())
        wire.append(msgspec.json.encode(reports[-1]))
    assert [msgspec.json.encode(report) for report in reports] == wire
    assert [report.copies.swap_out.blocks for report in reports] == [1, 2, 3]
    assert rig.controller.transfers.take_report().copies is reports[-1].copies, "a step without news copies nothing"
    counted, told = rig.controller.copies, reports[-1].copies
    parts = [field.name for field in fields(counted) if is_dataclass(getattr(counted, field.name))]
    assert parts
    assert all(getattr(counted, part) is not getattr(told, part) for part in parts)


def test_a_report_says_how_blocks_are_copied_now(rig, monkeypatch):
    assert [(path.direction, path.is_used) for path in rig.controller.copies.paths] == [("in", True), ("out", True)]
    left = (CopyPath("out", "some", "it failed"),)
    monkeypatch.setattr(rig.runtime, "copy_paths", lambda: left)
    assert rig.controller.transfers.take_report().copies.paths != left, "nothing has happened"
    rig.submit(swap_out((0,), (0,)))
    rig.controller.transfers.drain()
    assert rig.controller.transfers.take_report().copies.paths == left


def test_the_device_tier_says_where_its_blocks_are(rig):
    addresses = [row.address for layer in rig.controller.transfers.device_rows for row in layer]
    assert addresses == [array.ctypes.data for array in rig.arrays]
