"""One suite for every implementation and face of the copy ops; the test's id names the one that ran.

Memory is poisoned, and after each copy every byte is compared: those that had to change, those that had not, and the
guards around them.
"""

from __future__ import annotations

import numpy as np
import pytest

from fastdeploy_kvcache_v1.errors import CacheStateError
from fastdeploy_kvcache_v1.worker.ops import CopyRun, CopyRuns, plan_runs
from tests.worker.ops.faces import FACES, Face, Memory, Shape, face


@pytest.fixture(params=FACES)
def op(request: pytest.FixtureRequest) -> Face:
    return face(request.param)


def slots(rng: np.random.Generator, count: int, num_slots: int, *, runs: bool) -> list[int]:
    """Distinct slots, either scattered or mostly neighbours."""
    if not runs:
        return [int(slot) for slot in rng.permutation(num_slots)[:count]]
    first = int(rng.integers(num_slots))
    return [(first + i) % num_slots for i in range(count)]


def copy_and_compare(op: Face, memory: Memory, device: list[int], host: list[int], *, to_host: bool) -> None:
    expected = [[array.copy() for array in layer] for layer in memory.device], memory.host.copy()
    offset = 0
    for layer, roles in enumerate(memory.device):
        for role, array in enumerate(roles):
            if to_host:
                expected[1][host, offset : offset + array.shape[1]] = array[device]
            else:
                expected[0][layer][role][device] = memory.host[host, offset : offset + array.shape[1]]
            offset += array.shape[1]
    guards = [guard.tobytes() for guard in memory.guards]
    targets, sources = (host, device) if to_host else (device, host)
    shape = memory.shape
    counts = {"num_sources": shape.device_slots, "num_targets": shape.host_slots}
    if not to_host:
        counts = {"num_sources": shape.host_slots, "num_targets": shape.device_slots}
    runs = plan_runs(sources, targets, **counts)
    rows = (memory.host_rows, memory.device_rows)
    op.copy(*(rows if to_host else rows[::-1]), runs)
    for layer, roles in enumerate(memory.device):
        for role, array in enumerate(roles):
            assert (array == expected[0][layer][role]).all(), f"{op.name}: layer {layer} role {role}"
    assert (memory.host == expected[1]).all(), f"{op.name}: host pool"
    assert [guard.tobytes() for guard in memory.guards] == guards, f"{op.name}: wrote beside the memory"


@pytest.mark.parametrize("to_host", [False, True], ids=["swap-in", "swap-out"])
@pytest.mark.parametrize("runs", [False, True], ids=["scattered", "runs"])
def test_random_copies(op, to_host, runs):
    rng = np.random.default_rng(11)
    for number in range(25):
        roles = tuple(int(width) for width in rng.integers(1, 600, rng.integers(1, 6)))
        shape = Shape(int(rng.integers(1, 5)), roles, int(rng.integers(1, 30)), int(rng.integers(2, 30)))
        if len(roles) * shape.layers == 1:
            continue  # a pool of one row per block is dense like a tensor: which side it is cannot be seen
        memory = Memory.random(shape, rng, shift=number % 16)
        count = int(rng.integers(0, min(shape.device_slots, shape.host_slots) + 1))
        device = slots(rng, count, shape.device_slots, runs=runs)
        host = slots(rng, count, shape.host_slots, runs=runs)
        copy_and_compare(op, memory, device, host, to_host=to_host)


@pytest.mark.parametrize(
    ("dtype", "block"),
    [("float32", (2, 64, 16)), ("float16", (2, 64, 16)), ("bfloat16", (2, 64, 16)), ("uint8", (1, 64, 33))],
)
def test_cache_shapes_of_every_dtype(op, dtype, block):
    """Key, value, and the scales of an 8-bit cache."""
    itemsize = {"float32": 4, "float16": 2, "bfloat16": 2, "uint8": 1}[dtype]
    row = int(np.prod(block)) * itemsize
    roles = (row, row, block[1] * 2, block[1] * 2) if dtype == "uint8" else (row, row)
    memory = Memory.random(Shape(3, roles, 20, 30), np.random.default_rng(3))
    copy_and_compare(op, memory, [3, 4, 5, 11, 19], [0, 1, 2, 29, 7], to_host=True)
    copy_and_compare(op, memory, [0, 19, 7, 8], [29, 1, 3, 4], to_host=False)


def test_an_empty_list_and_one_block(op):
    memory = Memory.random(Shape(2, (48, 16), 3, 3), np.random.default_rng(0))
    copy_and_compare(op, memory, [], [], to_host=True)
    copy_and_compare(op, memory, [2], [0], to_host=True)
    copy_and_compare(op, memory, [0], [2], to_host=False)


def test_rows_large_enough_for_non_temporal_stores(op):
    memory = Memory.random(Shape(2, ((1 << 18) + 5, 1 << 16), 6, 6), np.random.default_rng(5), shift=3)
    copy_and_compare(op, memory, [5, 0, 1], [2, 3, 4], to_host=True)
    copy_and_compare(op, memory, [4, 3, 2], [0, 1, 2], to_host=False)


@pytest.mark.parametrize("to_host", [False, True], ids=["swap-in", "swap-out"])
def test_a_hundred_thousand_blocks(op, to_host):
    rng = np.random.default_rng(1)
    memory = Memory.random(Shape(1, (16, 8), 100_000, 100_000), rng)
    device = slots(rng, 100_000, 100_000, runs=False)
    host = slots(rng, 100_000, 100_000, runs=True)
    copy_and_compare(op, memory, device, host, to_host=to_host)


REFUSED = {
    "a target twice": [CopyRun(0, 1, 1), CopyRun(2, 1, 1)],
    "targets that overlap": [CopyRun(0, 1, 2), CopyRun(2, 2, 1)],
    "a source beyond its end": [CopyRun(5, 0, 2)],
    "a target beyond its end": [CopyRun(0, 3, 2)],
    "a negative source": [CopyRun(-1, 0, 1)],
    "a negative target": [CopyRun(0, -1, 1)],
    "an empty run": [CopyRun(0, 0, 0)],
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_refused_copy_moves_nothing(op, what):
    """The twin relies on `plan_runs` and the checks of the face above it."""
    if op.name == "numpy":
        pytest.skip("numpy: checks are the caller's")
    memory = Memory.random(Shape(2, (24, 8), 6, 4), np.random.default_rng(2))
    before = memory.bytes_of_everything()
    good = CopyRun(3, 0, 1) if what != "a negative target" else CopyRun(3, 3, 1)
    bad = REFUSED[what] if what != "an empty run" or op.name != "paddle" else [CopyRun(9, 0, 1)]
    with pytest.raises(CacheStateError):
        op.copy(memory.host_rows, memory.device_rows, CopyRuns.of([good, *bad] if good not in bad else bad))
    assert memory.bytes_of_everything() == before


def test_rows_that_do_not_fit_are_refused(op):
    if op.name == "numpy" or op.name.startswith("paddle"):
        pytest.skip(f"{op.name}: takes no rows of its own")
    small = Memory.random(Shape(1, (24, 8), 4, 4), np.random.default_rng(2))
    large = Memory.random(Shape(1, (24, 16), 4, 4), np.random.default_rng(2))
    before = small.bytes_of_everything()
    with pytest.raises(CacheStateError, match="rows of 16 bytes cannot be copied to rows of 8"):
        op.copy(small.host_rows, large.device_rows, CopyRuns.of([CopyRun(0, 0, 1)]))
    with pytest.raises(CacheStateError, match="source and target are the same memory"):
        op.copy(small.device_rows, small.device_rows, CopyRuns.of([CopyRun(0, 1, 1)]))
    twice = [(small.host_rows[0][0], small.host_rows[0][0])]
    sources = [(large.device_rows[0][0], large.device_rows[0][0])]
    with pytest.raises(CacheStateError, match="two of the targets are the same memory"):
        op.copy(twice, sources, CopyRuns.of([CopyRun(0, 1, 1)]))
    assert small.bytes_of_everything() == before
