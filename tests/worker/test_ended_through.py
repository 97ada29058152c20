"""How far copies are, as a report says it: storage fills and reads host slots by it."""

import pytest

from fastdeploy_kvcache_v1.errors import LayerSwapTimeoutError
from fastdeploy_kvcache_v1.worker import transfer_manager
from fastdeploy_kvcache_v1.worker.runtime import CpuRuntime
from tests.worker.worker_fakes import LIMIT_S, Gates, Rig, evict, swap_in

pytestmark = pytest.mark.usefixtures("cpu_ops")

INPUT, OUTPUT = "kv-input", "kv-output"


@pytest.fixture
def gates():
    return Gates()


@pytest.fixture
def rig(gates):
    rig = Rig(CpuRuntime(delay=gates))
    yield rig
    rig.close()


def ended(rig):
    return rig.controller.take_report().ended_through


def test_a_step_without_copies_has_ended_when_it_arrived(rig):
    assert ended(rig) == -1
    rig.submit()
    assert ended(rig) == 1


def test_the_oldest_open_copy_counts_whatever_ended_behind_it(rig, gates):
    open_gate = gates.close(OUTPUT)
    rig.submit(evict((0,), (0,)))
    rig.submit(into=swap_in((1,), (1,))).wait_all()
    assert ended(rig) == 0
    open_gate()
    rig.controller.drain(LIMIT_S)
    assert ended(rig) == 2


def test_a_copy_that_was_given_up_is_open_as_long_as_it_runs(rig, gates):
    open_gate = gates.close(INPUT)
    counter = rig.submit(into=swap_in((0,), (4,)))
    with pytest.raises(LayerSwapTimeoutError):
        counter.wait_for_layer(0, timeout=0.001)
    report = rig.controller.take_report()
    assert [result.ok for result in report.transfers] == [False]
    assert report.ended_through == 0
    open_gate()
    rig.controller.drain(LIMIT_S)
    assert ended(rig) == 1


def test_a_copy_that_ends_while_the_report_is_made_is_in_the_next_one_with_its_result(rig, gates, monkeypatch):
    """Else a copy that failed would count as ended before its failure is told: what it left would be stored."""
    open_gate = gates.close(OUTPUT)
    gates.fail_next(OUTPUT, OSError("no such page"))
    rig.submit(evict((0,), (0,)))
    result_of = transfer_manager.Transfer.result

    def ends_just_after(transfer):
        result = result_of(transfer)
        open_gate()
        rig.controller.drain(LIMIT_S)
        return result

    monkeypatch.setattr(transfer_manager.Transfer, "result", ends_just_after)
    first = rig.controller.take_report()
    assert (first.transfers, first.ended_through) == ((), 0)
    second = rig.controller.take_report()
    assert ([result.ok for result in second.transfers], second.ended_through) == ([False], 1)
