"""Any plan, by any path, gives the bytes that NumPy gives; the test's id names the path.

Memory is poisoned, and after each copy every byte is compared: those that had to change, those that had not, and what
lies between the tensors.
"""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest

from fastdeploy_kvcache_v1.errors import CacheStateError
from fastdeploy_kvcache_v1.worker.ops import CopyRun, CopyRuns, plan_runs
from tests.worker.ops.copies import CHECK_NOTHING, PATHS, Memory, by_cupy, path


@pytest.fixture(params=PATHS)
def copy(request):
    return by_cupy(request.getfixturevalue("gpu")) if request.param == "cupy" else path(request.param)


@pytest.fixture
def rng():
    return np.random.default_rng(11)


def copy_and_compare(copy, memory, device, host, *, to_host):
    expected = memory.bytes.copy()
    tiers = memory.tiers_in(expected)
    for on_device, on_host in zip(chain(*tiers.device), chain(*tiers.host_roles), strict=True):
        if to_host:
            on_host[host] = on_device[device]
        else:
            on_device[device] = on_host[host]
    pairs = [(device, len(memory.tiers.device[0][0]), memory.device_rows), (host, len(tiers.host), memory.host_rows)]
    (of, num_sources, sources), (to, num_targets, targets) = pairs if to_host else pairs[::-1]
    copy(targets, sources, plan_runs(of, to, num_sources=num_sources, num_targets=num_targets))
    assert np.flatnonzero(memory.bytes != expected).tolist() == []


@pytest.mark.parametrize("to_host", [False, True], ids=["swap-in", "swap-out"])
@pytest.mark.parametrize("scattered", [False, True], ids=["neighbours", "scattered"])
def test_random_copies(copy, rng, to_host, scattered):
    def slots(count, num_slots):
        first = int(rng.integers(num_slots))
        in_a_row = [(first + i) % num_slots for i in range(num_slots)]
        return [*map(int, rng.permutation(num_slots) if scattered else in_a_row)][:count]

    for number in range(25):
        widths = rng.integers(1, 600, rng.integers(1, 6)).tolist()
        layers, device, host = map(int, rng.integers([1, 1, 2], [5, 30, 30]))
        if len(widths) * layers == 1:
            continue  # a pool of one row per block is dense like a tensor: which side it is cannot be seen
        memory = Memory(rng, layers=layers, widths=widths, device_slots=device, host_slots=host, shift=number % 16)
        count = int(rng.integers(0, min(device, host) + 1))
        copy_and_compare(copy, memory, slots(count, device), slots(count, host), to_host=to_host)


@pytest.mark.parametrize(
    ("layers", "widths", "shift"),
    [
        (3, (8192, 8192), 0),
        (3, (2112, 2112, 128, 128), 0),  # 8 bits per number, and their scales
        (1, ((1 << 18) + 5, 1 << 16), 3),  # large enough for non-temporal stores
    ],
)
def test_shapes_of_caches(copy, rng, layers, widths, shift):
    memory = Memory(rng, layers=layers, widths=widths, device_slots=20, host_slots=30, shift=shift)
    copy_and_compare(copy, memory, [3, 4, 5, 11, 19], [0, 1, 2, 29, 7], to_host=True)
    copy_and_compare(copy, memory, [0, 19, 7, 8], [29, 1, 3, 4], to_host=False)
    copy_and_compare(copy, memory, [2], [0], to_host=True)
    copy_and_compare(copy, memory, [], [], to_host=True)


@pytest.mark.parametrize("to_host", [False, True], ids=["swap-in", "swap-out"])
def test_very_many_blocks(copy, rng, to_host):
    blocks = 20_000
    memory = Memory(rng, layers=1, widths=(16, 8), device_slots=blocks, host_slots=blocks)
    host = [*range(7, blocks), *range(7)]
    copy_and_compare(copy, memory, rng.permutation(blocks).tolist(), host, to_host=to_host)


@pytest.mark.parametrize(
    "runs",
    [
        # source, target, blocks; of 6 sources and 4 targets
        [(3, 0, 1), (0, 1, 1), (2, 1, 1)],
        [(3, 0, 1), (0, 1, 2), (2, 2, 1)],
        [(3, 0, 1), (5, 1, 2)],
        [(3, 0, 1), (0, 3, 2)],
        [(3, 0, 1), (-1, 1, 1)],
        [(3, 3, 1), (0, -1, 1)],
    ],
    ids=["a target twice", "targets overlap", "beyond the sources", "beyond the targets", "no source", "no target"],
)
def test_a_refused_copy_moves_nothing(request, copy, rng, runs):
    if request.node.callspec.params["copy"] in CHECK_NOTHING:
        pytest.skip("checks are the caller's")
    memory = Memory(rng, host_slots=4)
    before = memory.bytes.copy()
    with pytest.raises(CacheStateError):
        copy(memory.host_rows, memory.device_rows, CopyRuns.of([CopyRun(*run) for run in runs]))
    assert (memory.bytes == before).all()
