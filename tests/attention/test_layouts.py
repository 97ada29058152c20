"""Layouts of the attention families: shapes and bytes, from a geometry by name, and through copies of every role."""

from __future__ import annotations

import inspect
from dataclasses import fields

import numpy as np
import pytest

from fastdeploy_kvcache_v1.attention.base import RoleSpec
from fastdeploy_kvcache_v1.attention.layouts import (
    FAMILIES,
    OF_EVERY_FAMILY,
    CacheGeometry,
    DSACacheBackend,
    GQACacheBackend,
    MLACacheBackend,
    make_cache_backend,
    needed_numbers,
)
from fastdeploy_kvcache_v1.contract.messages import SwapStep
from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.worker.cache_controller import CacheController
from fastdeploy_kvcache_v1.worker.ops import tensor_rows
from fastdeploy_kvcache_v1.worker.runtime import CpuRuntime
from tests.worker.worker_fakes import swap_in, swap_out


@pytest.mark.usefixtures("cpu_ops")
def test_values_are_seen_through_the_tensor():
    backend = GQACacheBackend(1, 1, 2, 2, "float32")
    key, value = backend.create_kv_cache(2).values()
    key[1] = 3.5
    row = tensor_rows(key, num_rows=2, row_bytes=16).array
    assert (row[1].view(np.float32) == 3.5).all()
    assert not row[0].any()
    with pytest.raises(ConfigError, match="contiguous"):
        tensor_rows(value.transpose([1, 0, 3, 2]), num_rows=1, row_bytes=32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1, 8, 4, "float32"), "num_layers"),
        ((1, 0, 8, 4, "float32"), "empty block shape"),
        ((1, 1, 8, 4, "float64"), "the cache dtype must be one of"),
        ((1, 1, 8, 4, "int8"), "the cache dtype must be one of"),
    ],
)
def test_bad_layouts_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        GQACacheBackend(*arguments)


@pytest.mark.parametrize(
    ("role", "shape", "dtype", "message"),
    [
        ("query", (1,), "float32", "the cache role must be one of key, value, .*, got 'query'"),
        ("key", (1,), "int4", "the cache dtype must be one of .*, got 'int4'"),
        ("key", (1, 0), "float32", "cache role key has an empty block shape"),
    ],
)
def test_a_tensor_of_an_unknown_role_dtype_or_shape_is_refused(role, shape, dtype, message):
    with pytest.raises(ConfigError, match=message):
        RoleSpec(role, shape, dtype)


def test_no_blocks_is_refused():
    with pytest.raises(ConfigError, match="at least 1 block"):
        GQACacheBackend(1, 1, 8, 4, "float32").create_kv_cache(0)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_tensors_are_zeros_and_named_from_the_first_layer_on(dtype):
    """As a draft model's layers, which follow the main model's."""
    made = GQACacheBackend(2, 1, 8, 4, dtype).create_kv_cache(1, rank=3, device=5, first_layer=7)
    layers = [f"{role}_caches_{layer}_rank3.device5" for layer in (7, 8) for role in ("key", "value")]
    assert list(made) == layers
    assert [tuple(tensor.shape) for tensor in made.values()] == [(1, 1, 4, 8)] * 4
    assert {str(tensor.dtype) for tensor in made.values()} == {f"paddle.{dtype}"}
    assert not any(float(tensor.astype("float32").abs().sum()) for tensor in made.values())


def test_scales_of_block_wise_fp8():
    layout = GQACacheBackend(2, 2, 8, 4, "uint8", scale_dtype="bfloat16").layout
    assert [(role.role, role.block_shape, role.dtype) for role in layout.roles] == [
        ("key", (2, 4, 8), "uint8"),
        ("value", (2, 4, 8), "uint8"),
        ("key_scale", (2, 4), "bfloat16"),
        ("value_scale", (2, 4), "bfloat16"),
    ]
    assert layout.block_bytes == 2 * (2 * 64 + 2 * 16)


@pytest.mark.parametrize(
    ("backend", "block_bytes", "shapes"),
    [
        (MLACacheBackend(2, 512, 64, 4, "bfloat16"), 2 * (4 * 576 * 2), {"key_0": [1, 4, 576], "key_1": [1, 4, 576]}),
        (DSACacheBackend(1, 512, 64, 128, 4), 4 * (656 + 132), {"key_0": [1, 4, 656], "indexer_0": [4, 132]}),
    ],
)
def test_tensors_of_each_layer(backend, block_bytes, shapes):
    assert backend.layout.block_bytes == block_bytes
    names = {name.replace("_", "_caches_") + "_rank0.device0": [3, *shape] for name, shape in shapes.items()}
    assert {name: tensor.shape for name, tensor in backend.create_kv_cache(3).items()} == names


@pytest.mark.parametrize(("rank", "index"), [(500, 128), (512, 100), (0, 128)])
def test_dsa_quantizes_in_blocks(rank, index):
    with pytest.raises(ConfigError, match="multiple of 128"):
        DSACacheBackend(1, rank, 64, index, 4)


# ---- by name: geometry in, layout out

NUMBERS = {"num_kv_heads": 2, "head_dim": 8, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}


def geometry(**numbers):
    return CacheGeometry(num_layers=3, block_size=4, dtype="bfloat16", **numbers)


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("gqa", GQACacheBackend(3, 2, 8, 4, "bfloat16")),
        ("mla", MLACacheBackend(3, 512, 64, 4, "bfloat16")),
        ("dsa", DSACacheBackend(3, 512, 64, 128, 4)),
    ],
)
def test_a_family_takes_its_numbers_out_of_a_geometry_that_has_all(family, expected):
    made = make_cache_backend(family, geometry(**NUMBERS))
    assert type(made) is type(expected)
    assert made.layout == expected.layout


def test_scales_are_cached_if_the_geometry_has_their_dtype():
    made = make_cache_backend("gqa", geometry(num_kv_heads=2, head_dim=8, scale_dtype="float32"))
    assert made.layout == GQACacheBackend(3, 2, 8, 4, "bfloat16", scale_dtype="float32").layout


def test_scales_are_never_left_out():
    """Dsa has a format of its own."""
    with pytest.raises(ConfigError, match="attention family mla caches no scales"):
        make_cache_backend("mla", geometry(**NUMBERS, scale_dtype="float32"))
    assert make_cache_backend("dsa", geometry(**NUMBERS, scale_dtype="float32")).layout.num_layers == 3


@pytest.mark.parametrize("family", FAMILIES)
def test_a_constructor_takes_fields_of_the_geometry_only(family):
    known = {field.name for field in fields(CacheGeometry)}
    assert set(inspect.signature(FAMILIES[family]).parameters) <= known
    assert set(OF_EVERY_FAMILY) <= known


@pytest.mark.parametrize("family", FAMILIES)
def test_every_number_that_is_missing_is_named(family):
    names = needed_numbers(family)
    with pytest.raises(ConfigError, match=f"lacks {', '.join(names)}, needed by the attention family {family}"):
        make_cache_backend(family, geometry())
    given = {name: NUMBERS[name] for name in names[1:]}
    with pytest.raises(ConfigError, match=f"lacks {names[0]}, needed by"):
        make_cache_backend(family, geometry(**given))


@pytest.mark.parametrize("ask", [needed_numbers, lambda family: make_cache_backend(family, geometry(**NUMBERS))])
def test_unknown_attention_family_is_refused_with_the_known_ones(ask):
    with pytest.raises(ConfigError, match=f"the attention family must be one of {', '.join(FAMILIES)}, got 'rwkv'"):
        ask("rwkv")


# ---- every role of every family, draft layer included, goes to the host and back: byte for byte, and not a byte more

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
        self.controller.transfers.submit(SwapStep(0, (swap_out((1, 3), (4, 2)),)))
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
def test_round_trip_keeps_every_role_of_every_layer_and_costs_block_bytes(name, trip):
    made = trip(name)
    assert made.run() == []
    block_bytes = backend_of(name).layout.block_bytes
    assert [each.num_bytes for each in made.controller.transfers.take_report().transfers] == [2 * block_bytes] * 2
    pool = made.controller.host_pool
    assert (pool.slot_bytes, pool.buffer.nbytes) == (block_bytes, HOST_BLOCKS * block_bytes)


def test_every_family_makes_a_round_trip():
    assert {family for family, _ in GEOMETRIES.values()} == set(FAMILIES)
