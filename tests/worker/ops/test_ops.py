"""The copy ops: planning runs, what the two sides of a copy must have, and the table of implementations."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy_kvcache_v1.contract.swap_message import SlotArray
from fastdeploy_kvcache_v1.errors import CacheStateError, ConfigError
from fastdeploy_kvcache_v1.worker import ops
from fastdeploy_kvcache_v1.worker.ops import BlockRows, plan_spans, tensor_rows
from tests.worker.ops.copies import rows_of

NUM_SLOTS = 12
SLOT = st.integers(0, NUM_SLOTS - 1)


@given(st.lists(st.tuples(SLOT, SLOT), unique_by=lambda copy: copy[1], max_size=NUM_SLOTS))
def test_runs_are_the_same_copies(copies):
    sources, targets = [source for source, _ in copies], [target for _, target in copies]
    spans = plan_spans(sources, targets, num_sources=NUM_SLOTS, num_targets=NUM_SLOTS)
    pairs = [(source + i, target + i) for source, target, blocks in spans for i in range(blocks)]
    assert sorted(pairs) == sorted(copies)
    assert spans.sources.tolist() == [source for source, _ in pairs]
    assert spans.targets.tolist() == [target for _, target in pairs]
    packed = SlotArray.of(sources), SlotArray.of(targets)
    assert plan_spans(*packed, num_sources=NUM_SLOTS, num_targets=NUM_SLOTS).table.tolist() == spans.table.tolist()
    for (source, target, blocks), (*after, _) in itertools.pairwise(spans):
        assert [source + blocks, target + blocks] != after


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
        plan_spans(kind(sources), kind(targets), num_sources=8, num_targets=9)


def test_a_plan_does_not_grow_with_the_tiers():
    """A byte for each slot of this one would be 4 GiB."""
    far = (1 << 32) - 3
    spans = plan_spans([5, 9, 4], [far + 1, 0, far], num_sources=1 << 20, num_targets=1 << 32)
    assert list(spans) == [[4, far, 2], [9, 0, 1]]


@pytest.mark.parametrize(
    ("num_rows", "row_bytes", "pitch", "address"), [(0, 1, 1, 1), (1, 0, 1, 1), (1, 2, 1, 1), (1, 1, 1, 0)]
)
def test_rows_need_memory(num_rows, row_bytes, pitch, address):
    with pytest.raises(CacheStateError, match="block rows need memory and a pitch of at least one row"):
        BlockRows(address, num_rows, row_bytes, pitch)
    assert BlockRows(8, 1, 1, 1).is_dense
    assert rows_of(np.zeros((1, 64), np.uint8)[:, :8]).array.shape == (1, 8)


def test_rows_are_a_view_of_the_tensor():
    array = np.zeros((3, 2, 4), np.float16)
    rows = tensor_rows(array, num_rows=3, row_bytes=16)
    rows.array[1] = 0xFF
    assert np.isnan(array[1]).all()
    assert not array[0].any()
    assert not array[2].any()
    with pytest.raises(ConfigError, match="contiguous"):
        tensor_rows(array[:, :1], num_rows=3, row_bytes=8)
    with pytest.raises(ConfigError, match="expected 4 blocks of 16"):
        tensor_rows(array, num_rows=4, row_bytes=16)


def test_host_memory_is_zeroed_aligned_and_given_back_once():
    buffer = ops.host_alloc(10_000)
    view = buffer.array[5_000:]
    assert buffer.nbytes == 10_000
    assert buffer.address % 4096 == 0
    assert not buffer.array.any()
    buffer.array[:] = 9
    buffer.free()
    assert (view == 9).all(), "a view keeps the memory alive"
    with pytest.raises(CacheStateError, match="freed"):
        buffer.free()
    num_files = len(os.listdir("/proc/self/fd"))
    for shared in (False, True):
        with pytest.raises(CacheStateError, match="at least one byte"):
            ops.host_alloc(0, shared=shared)
        one = ops.host_alloc(1, shared=shared)
        assert one.nbytes == 1
        assert (one.file is not None) == shared
        one.free()
        with pytest.raises(MemoryError):
            ops.host_alloc(1 << 60, shared=shared)
    assert len(os.listdir("/proc/self/fd")) == num_files


@pytest.mark.parametrize("shared", [False, True])
def test_memory_kept_to_this_process_is_in_no_fork_and_no_core_dump(shared):
    buffer = ops.host_alloc(10_000, shared=shared)
    buffer.keep_to_this_process()
    smaps = Path("/proc/self/smaps").read_text().partition(f"{buffer.address:x}-")[2]
    flags = smaps.partition("VmFlags: ")[2].partition("\n")[0].split()
    assert {"dc", "dd"} <= {*flags}
    buffer.free()
