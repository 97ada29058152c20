"""The GQA layout on real paddle tensors."""

from __future__ import annotations

import numpy as np
import pytest

from fastdeploy_kvcache_v1.attention.gqa import GQACacheBackend
from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.worker.ops import tensor_rows

pytestmark = pytest.mark.usefixtures("cpu_ops")


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
        ((1, 1, 8, 4, "float64"), "unsupported cache dtype 'float64'"),
        ((1, 1, 8, 4, "int8"), "unsupported cache dtype 'int8'"),
    ],
)
def test_bad_layouts_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        GQACacheBackend(*arguments)


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
