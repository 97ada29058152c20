"""Every role of every family, draft layer included, goes to the host and back: byte for byte, and not a byte more.

The test that proves it is held to faults itself: a role that is left out, taken for another, or put into the next slot.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fastdeploy_kvcache_v1.attention.geometry import CacheGeometry
from fastdeploy_kvcache_v1.attention.registry import make_cache_backend
from fastdeploy_kvcache_v1.metadata import SwapStep
from fastdeploy_kvcache_v1.worker import ops
from fastdeploy_kvcache_v1.worker.cache_controller import CacheController
from fastdeploy_kvcache_v1.worker.ops import Implementation
from fastdeploy_kvcache_v1.worker.runtime import CpuRuntime
from tests.worker.worker_fakes import evict, swap_in

LAYERS = 3
"""The last one is a draft layer's."""
DEVICE_BLOCKS = HOST_BLOCKS = 6
HEADS = {"num_kv_heads": 2, "head_dim": 8}
LATENT = {"kv_lora_rank": 128, "qk_rope_head_dim": 16}

GEOMETRIES = {
    "gqa": ("gqa", {"dtype": "bfloat16", **HEADS}),
    "gqa, float32": ("gqa", {"dtype": "float32", **HEADS}),
    "gqa, float16": ("gqa", {"dtype": "float16", **HEADS}),
    "gqa, int8": ("gqa", {"dtype": "uint8", **HEADS}),
    "gqa, int4": ("gqa", {"dtype": "uint8", **HEADS, "head_dim": 4}),
    "gqa, block_wise_fp8": ("gqa", {"dtype": "uint8", "scale_dtype": "bfloat16", **HEADS}),
    "mla": ("mla", {"dtype": "bfloat16", **LATENT}),
    "dsa": ("dsa", {"dtype": "bfloat16", **LATENT, "index_head_dim": 128}),
}


def backend_of(name):
    family, numbers = GEOMETRIES[name]
    return make_cache_backend(family, CacheGeometry(num_layers=LAYERS, block_size=4, **numbers))


def pattern(layer, role, slot, nbytes):
    """Of one place alone."""
    seed = (layer * 16 + role) * 16 + slot
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


class RoundTrip:
    """Blocks 1 and 3 leave for host slots 4 and 2, and come back into 0 and 4."""

    def __init__(self, name):
        self.runtime = CpuRuntime()
        self.controller = CacheController(backend_of(name), runtime=self.runtime)
        self.controller.initialize_kv_cache(DEVICE_BLOCKS, HOST_BLOCKS)

    def places(self):
        for layer, roles in enumerate(self.controller.device_rows):
            for role, rows in enumerate(roles):
                yield layer, role, rows

    def run(self):
        """Places whose bytes are wrong afterwards, `(layer, role, slot)`."""
        for layer, role, rows in self.places():
            for slot in range(DEVICE_BLOCKS):
                rows.array[slot] = pattern(layer, role, slot, rows.row_bytes)
        self.controller.submit_swap_tasks(SwapStep(0, (evict((1, 3), (4, 2)),)))
        self.controller.drain(20)
        for _, _, rows in self.places():
            rows.array[[1, 3]] = 0
        self.controller.submit_swap_tasks(SwapStep(1, (swap_in((4, 2), (0, 4)),)))
        self.controller.drain(20)
        now = {0: 1, 1: None, 2: 2, 3: None, 4: 3, 5: 5}
        return [
            (layer, role, slot)
            for layer, role, rows in self.places()
            for slot, content in now.items()
            if rows.array[slot].tobytes()
            != (bytes(rows.row_bytes) if content is None else pattern(layer, role, content, rows.row_bytes).tobytes())
        ]

    def close(self):
        self.controller.free()
        self.runtime.close()


@pytest.fixture
def trip():
    opened = []

    def make(name):
        opened.append(RoundTrip(name))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def instead_of(op, change, undo):
    """Let `change(targets, sources)` of one layer's roles go before the copies of `op`."""
    original = ops.TWINS[op, "cpu"]

    def changed(targets, sources, runs, stream):
        if op == "swap_cache_per_layer":
            original.run(*change(targets, sources), runs, 0)
            return
        layers = [change(to, of) for to, of in zip(targets, sources, strict=True)]
        original.run([to for to, _ in layers], [of for _, of in layers], runs, 0)

    undo.append((op, "cpu", ops.install(op, "cpu", Implementation("changed", changed))))


@pytest.fixture
def undo(monkeypatch):
    monkeypatch.setattr(ops, "COMPILED", None)
    entries = []
    yield entries
    for entry in entries:
        ops.install(*entry)


@pytest.mark.usefixtures("cpu_ops")
@pytest.mark.parametrize("name", GEOMETRIES)
def test_every_role_of_every_layer_survives_a_round_trip(name, trip):
    assert trip(name).run() == []


def left_out(role, other):
    def change(targets, sources):
        kept = [each for each in range(len(targets)) if each != role]
        return tuple(targets[each] for each in kept), tuple(sources[each] for each in kept)

    return change


def taken_for(role, other):
    def change(targets, sources):
        wrong = replace(sources[other], row_bytes=min(sources[role].row_bytes, sources[other].row_bytes))
        to = replace(targets[role], row_bytes=wrong.row_bytes)
        return (*targets[:role], to, *targets[role + 1 :]), (*sources[:role], wrong, *sources[role + 1 :])

    return change


def put_next_door(role, other):
    def change(targets, sources):
        rows = targets[role]
        moved = replace(rows, address=rows.row_address(1), num_rows=rows.num_rows - 1)
        return (*targets[:role], moved, *targets[role + 1 :]), sources

    return change


ROLES = [(name, role) for name in GEOMETRIES for role in range(len(backend_of(name).layout.roles))]


@pytest.mark.parametrize("op", ["swap_cache_all_layers", "swap_cache_per_layer"])
@pytest.mark.parametrize("fault", [left_out, taken_for, put_next_door])
@pytest.mark.parametrize(("name", "role"), ROLES)
def test_a_role_that_goes_astray_is_noticed(name, role, fault, op, trip, undo):
    roles = len(backend_of(name).layout.roles)
    if fault is taken_for and roles == 1:
        pytest.skip("there is one role only")
    broken = trip(name)
    instead_of(op, fault(role, (role + 1) % roles), undo)
    wrong = broken.run()
    assert {place[1] for place in wrong} == {role}, "this role, and no other one"
    assert {place[0] for place in wrong} == set(range(LAYERS))


@pytest.mark.parametrize("name", GEOMETRIES)
def test_a_swapped_block_costs_the_bytes_of_its_layout(name, trip, undo):
    moved = []

    def count(targets, sources):
        assert [rows.row_bytes for rows in targets] == [rows.row_bytes for rows in sources]
        moved.extend(rows.row_bytes for rows in targets)
        return targets, sources

    for op in ("swap_cache_all_layers", "swap_cache_per_layer"):
        instead_of(op, count, undo)
    both = trip(name)
    assert both.run() == []
    report = both.controller.take_report().transfers
    block_bytes = both.controller.layout.block_bytes
    assert sum(moved) == 2 * block_bytes, "once per direction and block"
    assert [each.num_bytes for each in report] == [2 * block_bytes] * 2


@pytest.mark.parametrize("name", GEOMETRIES)
def test_host_memory_is_what_the_layout_says(name, trip):
    pool = trip(name).controller.host_pool
    assert pool.buffer.nbytes == HOST_BLOCKS * backend_of(name).layout.block_bytes
    assert pool.slot_bytes == backend_of(name).layout.block_bytes
