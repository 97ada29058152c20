"""The copy ops: planning runs, the NumPy twin against plain loops, and the table of implementations."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy_kvcache_v1.errors import CacheStateError, ConfigError
from fastdeploy_kvcache_v1.slot_array import SlotArray
from fastdeploy_kvcache_v1.worker import ops
from fastdeploy_kvcache_v1.worker.ops import BlockRows, CopyRun, CopyRuns, Implementation, plan_runs, tensor_rows

pytestmark = pytest.mark.usefixtures("cpu_ops")

NUM_SLOTS = 12

copies = st.lists(st.integers(0, NUM_SLOTS - 1), unique=True, max_size=NUM_SLOTS).flatmap(
    lambda targets: st.tuples(
        st.lists(st.integers(0, NUM_SLOTS - 1), min_size=len(targets), max_size=len(targets)), st.just(targets)
    )
)


def rows_of(array: np.ndarray) -> BlockRows:
    """Rows of a `[rows, bytes]` view, dense or not."""
    return BlockRows(array.ctypes.data, array.shape[0], array.shape[1], array.strides[0], owner=array)


def test_neighbours_become_one_run():
    assert plan_runs((4, 5, 6), (1, 2, 3), num_sources=8, num_targets=8) == [CopyRun(4, 1, 3)]
    assert plan_runs((6, 4, 5), (3, 1, 2), num_sources=8, num_targets=8) == [CopyRun(4, 1, 3)]
    assert plan_runs((4, 5, 7), (1, 2, 3), num_sources=8, num_targets=8) == [CopyRun(4, 1, 2), CopyRun(7, 3, 1)]
    assert plan_runs((4, 4), (1, 2), num_sources=8, num_targets=8) == [CopyRun(4, 1, 1), CopyRun(4, 2, 1)]
    assert plan_runs((), (), num_sources=0, num_targets=0) == []


def test_runs_that_were_not_planned_name_their_rows_too():
    runs = CopyRuns.of([CopyRun(4, 1, 3), CopyRun(9, 7, 2)])
    assert (runs.sources.tolist(), runs.targets.tolist()) == ([4, 5, 6, 9, 10], [1, 2, 3, 7, 8])
    assert (runs[1:].sources.tolist(), runs[1:].targets.tolist()) == ([9, 10], [7, 8])
    assert CopyRuns.of([]).sources.tolist() == []


@given(copies)
def test_runs_are_the_same_copies(copy):
    sources, targets = copy
    runs = plan_runs(sources, targets, num_sources=NUM_SLOTS, num_targets=NUM_SLOTS)
    pairs = [(run.source + i, run.target + i) for run in runs for i in range(run.blocks)]
    assert sorted(pairs) == sorted(zip(sources, targets, strict=True))
    assert runs.sources.tolist() == [source for source, _ in pairs]
    assert runs.targets.tolist() == [target for _, target in pairs]
    packed = SlotArray.of(sources), SlotArray.of(targets)
    assert plan_runs(*packed, num_sources=NUM_SLOTS, num_targets=NUM_SLOTS) == runs
    for a, b in itertools.pairwise(runs):
        assert (a.source + a.blocks, a.target + a.blocks) != (b.source, b.target)


@pytest.mark.parametrize(
    ("sources", "targets", "message"),
    [
        ((1, 2), (3,), "one target per source"),
        ((8,), (0,), r"source slots must be in \[0, 8\)"),
        ((-1,), (0,), "source slots"),
        ((0,), (9,), r"target slots must be in \[0, 9\)"),
        ((0, 1), (5, 5), "writes a target slot twice"),
        ((0.5,), (1,), "must be integers"),
    ],
)
@pytest.mark.parametrize("kind", [tuple, SlotArray.of])
def test_bad_slots_are_refused(sources, targets, message, kind):
    if kind is not tuple and 0.5 in sources:
        pytest.skip("it holds integers only")
    with pytest.raises(CacheStateError, match=message):
        plan_runs(kind(sources), kind(targets), num_sources=8, num_targets=9)


@given(copies, st.booleans())
def test_the_twin_moves_what_a_plain_loop_moves(copy, to_host):
    sources, targets = copy
    rng = np.random.default_rng(len(sources))
    dense = rng.integers(0, 256, (2, 2, NUM_SLOTS, 24), dtype=np.uint8)  # [layer][role][slot][bytes]
    strided = rng.integers(0, 256, (NUM_SLOTS, 2, 2, 24), dtype=np.uint8)  # [slot][layer][role][bytes]
    of, to = (dense, strided) if to_host else (strided, dense)
    expected = to.copy()
    for source, target in zip(sources, targets, strict=True):
        for layer, role in np.ndindex(2, 2):
            if to_host:
                expected[target, layer, role] = dense[layer, role, source]
            else:
                expected[layer, role, target] = strided[source, layer, role]
    dense_rows = [tuple(rows_of(dense[layer, role]) for role in range(2)) for layer in range(2)]
    strided_rows = [tuple(rows_of(strided[:, layer, role]) for role in range(2)) for layer in range(2)]
    runs = plan_runs(sources, targets, num_sources=NUM_SLOTS, num_targets=NUM_SLOTS)
    if to_host:
        ops.swap_cache_all_layers(strided_rows, dense_rows, runs)
    else:
        for layer in range(2):
            ops.swap_cache_per_layer(dense_rows[layer], strided_rows[layer], runs)
    assert (to == expected).all()
    assert of is not to


def test_sides_that_do_not_fit_are_refused_before_a_byte_moves():
    small, big = np.zeros((4, 8), np.uint8), np.ones((4, 16), np.uint8)
    with pytest.raises(CacheStateError, match="same size"):
        ops.swap_cache_per_layer((rows_of(small),), (rows_of(big),), [CopyRun(0, 0, 1)])
    with pytest.raises(CacheStateError, match="same layers"):
        ops.swap_cache_all_layers([(rows_of(small),)], [], [CopyRun(0, 0, 1)])
    source = np.ones((5, 8), np.uint8)
    for run in (CopyRun(4, 0, 2), CopyRun(0, 3, 2), CopyRun(-1, 0, 1)):
        with pytest.raises(CacheStateError, match="a swap"):
            ops.swap_cache_per_layer((rows_of(small),), (rows_of(source),), [CopyRun(0, 0, 1), run])
    assert not small.any()


def test_rows_are_a_view_of_the_tensor():
    array = np.zeros((3, 2, 4), np.float16)
    rows = tensor_rows(array, num_rows=3, row_bytes=16)
    rows.array[1] = 0xFF
    assert np.isnan(array[1]).all()
    assert not array[0].any()
    assert not array[2].any()
    with pytest.raises(ConfigError, match="contiguous"):
        tensor_rows(array[:, :1], num_rows=3, row_bytes=8)
    with pytest.raises(ConfigError, match="its layout needs 4 blocks"):
        tensor_rows(array, num_rows=4, row_bytes=16)
    with pytest.raises(CacheStateError):
        BlockRows(array.ctypes.data, 3, 16, 8)


def test_the_table_names_what_runs(cpu_ops):
    memory = "mmap" if cpu_ops == "numpy" else cpu_ops
    assert {name: live for name, live in ops.live().items() if name.endswith(".cpu")} == {
        "swap_cache_per_layer.cpu": cpu_ops,
        "swap_cache_all_layers.cpu": cpu_ops,
        "host_alloc.cpu": memory,
        "host_free.cpu": memory,
    }
    assert set(ops.live()) >= {"swap_cache_per_layer.cuda", "swap_cache_all_layers.cuda"}


def test_another_implementation_can_take_over():
    calls = []
    array = np.zeros((2, 8), np.uint8)
    mine = Implementation("mine", lambda *args: calls.append(args))
    previous = ops.install("swap_cache_per_layer", "cpu", mine)
    try:
        ops.swap_cache_per_layer((rows_of(array),), (rows_of(array),), [CopyRun(0, 1, 1)], stream=7)
        assert ops.live()["swap_cache_per_layer.cpu"] == "mine"
    finally:
        assert ops.install("swap_cache_per_layer", "cpu", previous) is mine
    assert [call[2:] for call in calls] == [([CopyRun(0, 1, 1)], 7)]
    with pytest.raises(CacheStateError, match="unknown op"):
        ops.install("swap_cache_per_layer", "tpu", previous)


def test_host_memory_may_be_asked_for_on_a_numa_node(cpu_ops):
    assert not ops.host_alloc(10_000, numa_node=0).array.any()
    if cpu_ops == "compiled":
        with pytest.raises(CacheStateError, match="there is no NUMA node 5000"):
            ops.host_alloc(10_000, numa_node=5000)


def test_shared_host_memory_is_refused_as_other_memory_is():
    with pytest.raises(CacheStateError, match="at least one byte"):
        ops.host_alloc_shared(0)
    with pytest.raises(MemoryError, match="shared host memory"):
        ops.host_alloc_shared(1 << 60)


def test_host_memory_is_zeroed_aligned_and_given_back_once():
    buffer = ops.host_alloc(10_000)
    view = buffer.array[5_000:]
    assert buffer.nbytes == 10_000
    assert buffer.address % 4096 == 0
    assert not buffer.array.any()
    buffer.array[:] = 9
    ops.host_free(buffer)
    assert (view == 9).all(), "a view keeps the memory alive"
    with pytest.raises(CacheStateError, match="freed"):
        ops.host_free(buffer)
    with pytest.raises(CacheStateError, match="at least one byte"):
        ops.host_alloc(0)
    with pytest.raises(MemoryError):
        ops.host_alloc(1 << 60)


@pytest.mark.process
def test_numpy_copies_are_the_word_of_a_started_server_not_of_an_import():
    """A notice in front of an error of start-up would hide it."""
    code = (
        "import logging, sys; logging.basicConfig(); from fastdeploy_kvcache_v1.worker import ops;"
        "print('imported', file=sys.stderr); ops.warn_of_slow_copies()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "FASTDEPLOY_KVCACHE_OPS": "numpy"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    first, second = done.stderr.splitlines()
    assert first == "imported"
    assert "no compiled copy ops, NumPy copies instead: FASTDEPLOY_KVCACHE_OPS says so" in second
