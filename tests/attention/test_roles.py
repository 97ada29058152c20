"""Every role of every family, draft layer included, goes to the host and back: byte for byte, and not a byte more."""

from __future__ import annotations

import numpy as np
import pytest

from fastdeploy_kvcache_v1.attention.geometry import CacheGeometry
from fastdeploy_kvcache_v1.attention.registry import make_cache_backend
from fastdeploy_kvcache_v1.contract.messages import SwapStep
from fastdeploy_kvcache_v1.worker.cache_controller import CacheController
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
        for layer, roles in enumerate(self.controller.transfers.device_rows):
            for role, rows in enumerate(roles):
                yield layer, role, rows

    def run(self):
        """Places whose bytes are wrong afterwards, `(layer, role, slot)`."""
        for layer, role, rows in self.places():
            for slot in range(DEVICE_BLOCKS):
                rows.array[slot] = pattern(layer, role, slot, rows.row_bytes)
        self.controller.transfers.submit(SwapStep(0, (evict((1, 3), (4, 2)),)))
        self.controller.transfers.drain(20)
        for _, _, rows in self.places():
            rows.array[[1, 3]] = 0
        self.controller.transfers.submit(SwapStep(1, (swap_in((4, 2), (0, 4)),)))
        self.controller.transfers.drain(20)
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


@pytest.fixture
def trip():
    opened = []

    def make(name):
        opened.append(RoundTrip(name))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


@pytest.mark.usefixtures("cpu_ops")
@pytest.mark.parametrize("name", GEOMETRIES)
def test_every_role_of_every_layer_survives_a_round_trip_and_costs_the_bytes_of_its_layout(name, trip):
    made = trip(name)
    assert made.run() == []
    block_bytes = backend_of(name).layout.block_bytes
    assert [each.num_bytes for each in made.controller.transfers.take_report().transfers] == [2 * block_bytes] * 2
    pool = made.controller.host_pool
    assert (pool.slot_bytes, pool.buffer.nbytes) == (block_bytes, HOST_BLOCKS * block_bytes)
