"""Any plan, by any way, gives the bytes that NumPy gives; the test's id names the way.

Memory is poisoned, and after each copy every byte is compared: those that had to change, those that had not, and what
lies between the tensors. Nothing in this file shows that CUDA does what its documentation says.
"""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest

from fastdeploy_kvcache_v1.errors import CacheStateError
from fastdeploy_kvcache_v1.worker.cuda.runtime import CudaRuntime
from fastdeploy_kvcache_v1.worker.ops import copies as module
from fastdeploy_kvcache_v1.worker.ops import plan_spans
from fastdeploy_kvcache_v1.worker.ops.copies import CpuCopies, cpu_paths
from fastdeploy_kvcache_v1.worker.ops.paddle_ops import PaddleCopies
from tests.gpu.stand_in.fake_driver import COMPUTE
from tests.worker.ops.copies import Memory, by, on_cpu


@pytest.fixture(params=["numpy", "c", "kernel", "batch", "spans"])
def copy(request, monkeypatch):
    if request.param == "numpy":
        monkeypatch.setattr(module, "library", lambda: None)
        return on_cpu
    if request.param == "c":
        if module.library() is None:
            pytest.skip("the C copies are not built: sudo apt-get install gcc, then scripts/build_ops.sh")
        return on_cpu
    return by(request.getfixturevalue("gpu"), request.param)


@pytest.fixture
def rng():
    return np.random.default_rng(11)


def copy_and_compare(copy, memory, device, host, *, to_device):
    expected = memory.bytes.copy()
    tiers = memory.tiers_in(expected)
    for on_device, on_host in zip(chain(*tiers.device), chain(*tiers.host_roles), strict=True):
        if to_device:
            on_device[device] = on_host[host]
        else:
            on_host[host] = on_device[device]
    sides = [(host, len(tiers.host)), (device, len(memory.tiers.device[0][0]))]
    (of, num_sources), (to, num_targets) = sides if to_device else sides[::-1]
    copy(memory, plan_spans(of, to, num_sources=num_sources, num_targets=num_targets), to_device)
    assert np.flatnonzero(memory.bytes != expected).tolist() == []


@pytest.mark.parametrize("to_device", [False, True], ids=["swap-out", "swap-in"])
@pytest.mark.parametrize("scattered", [False, True], ids=["neighbours", "scattered"])
def test_random_copies(copy, rng, to_device, scattered):
    def slots(count, num_slots):
        first = int(rng.integers(num_slots))
        in_a_row = [(first + i) % num_slots for i in range(num_slots)]
        return [*map(int, rng.permutation(num_slots) if scattered else in_a_row)][:count]

    for number in range(25):
        unit = (1, 4, 16)[number % 3]
        widths = (unit * rng.integers(1, 600 // unit, rng.integers(1, 6))).tolist()
        layers, device, host = map(int, rng.integers([1, 2, 2], [5, 30, 30]))
        memory = Memory(rng, layers=layers, widths=widths, device_slots=device, host_slots=host, shift=number % 16)
        count = int(rng.integers(0, min(device, host) + 1))
        copy_and_compare(copy, memory, slots(count, device), slots(count, host), to_device=to_device)


@pytest.mark.parametrize(
    ("layers", "widths", "shift"),
    [
        (3, (8192, 8192), 0),
        (3, (2112, 2112, 128, 128), 0),  # 8 bits per number, and their scales
        (1, ((1 << 18) + 5, 1 << 16), 3),
    ],
)
def test_shapes_of_caches(copy, rng, layers, widths, shift):
    memory = Memory(rng, layers=layers, widths=widths, device_slots=20, host_slots=30, shift=shift)
    copy_and_compare(copy, memory, [3, 4, 5, 11, 19], [0, 1, 2, 29, 7], to_device=False)
    copy_and_compare(copy, memory, [0, 19, 7, 8], [29, 1, 3, 4], to_device=True)
    copy_and_compare(copy, memory, [2], [0], to_device=False)
    copy_and_compare(copy, memory, [], [], to_device=False)


@pytest.mark.parametrize("to_device", [False, True], ids=["swap-out", "swap-in"])
def test_very_many_blocks(copy, rng, to_device):
    blocks = 4_200
    memory = Memory(rng, layers=1, widths=(16, 8), device_slots=blocks, host_slots=blocks)
    host = [*range(7, blocks), *range(7)]
    copy_and_compare(copy, memory, rng.permutation(blocks).tolist(), host, to_device=to_device)


def test_tiers_that_do_not_fit_each_other_are_refused(gpu, rng):
    one, other = Memory(rng, widths=(40, 8)), Memory(rng, widths=(40, 16))
    cases = [(one.device_rows, other.host_rows), (one.device_rows, one.host_rows[:1]), ([], [])]
    for make in (CpuCopies, PaddleCopies, CudaRuntime(compute_handle=COMPUTE).new_copies):
        for device, host in cases:
            with pytest.raises(CacheStateError, match="the same roles of the same size in every layer"):
                make(device, host)


def test_copy_path_on_a_cpu_is_reported(cpu_ops):
    assert [(path.direction, path.name, path.left) for path in cpu_paths()] == [
        ("in", cpu_ops, ""),
        ("out", cpu_ops, ""),
    ]
