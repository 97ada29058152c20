"""`create_kv_cache` for FastDeploy's attention backends: our layouts, checked against FastDeploy's shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..attention.base import AttentionCacheBackend, CacheLayout
from ..attention.layouts import FAMILIES, CacheGeometry, make_cache_backend, needed_numbers
from ..errors import ConfigError

BLOCK_WISE_FP8 = "block_wise_fp8"
INT4 = "int4_zp"
"""Two values in one byte, along the head dimension."""

MLA, DSA, PLAS, NATIVE = "MLA_ATTN", "DSA_ATTN", "PLAS_ATTN", "NATIVE_ATTN"
"""Values of FD_ATTENTION_BACKEND."""

_IN_BACKENDS = {"num_kv_heads": "kv_num_heads"}
"""Names in FastDeploy's backend objects of fields of `CacheGeometry`."""


def add_create_kv_cache(attention_backend: Any) -> None:
    attention_backend.create_kv_cache = create_kv_cache


def create_kv_cache(
    self: Any,
    num_blocks: int,
    num_layers: int,
    *,
    dtype: str,
    quant_type: str | None = None,
    rank: int = 0,
    device: int = 0,
    first_layer: int = 0,
) -> dict[str, Any]:
    """Zero-filled cache tensors by name, in the order of the kernels' indices. A method of FastDeploy's backends.

    `dtype` is the model's; quantized caches are uint8. Raises `ConfigError` if FastDeploy's shapes differ from ours.
    """
    made = cache_backend(self, num_layers, dtype=dtype, quant_type=quant_type)
    return made.create_kv_cache(num_blocks, rank=rank, device=device, first_layer=first_layer)


def cache_backend(backend: Any, num_layers: int, *, dtype: str, quant_type: str | None) -> AttentionCacheBackend:
    """Our cache backend for FastDeploy's `backend`. Raises `ConfigError`."""
    name = type(backend).__name__
    family = family_of(name)
    made = make_backend(
        family,
        {number: getattr(backend, _IN_BACKENDS.get(number, number)) for number in needed_numbers(family)},
        num_layers=num_layers,
        block_size=backend.block_size,
        dtype=dtype,
        quant_type=quant_type,
        scale_dtype=_default_dtype() if quant_type == BLOCK_WISE_FP8 else dtype,
    )
    _expect_shapes(name, made.layout, backend.get_kv_cache_shape(max_num_blocks=1, kv_cache_quant_type=quant_type))
    return made


def family_of(attention_backend: str) -> str:
    """The family that begins the backend's name or class (`MLA_ATTN`, `MLAAttentionBackend`); else "gqa"."""
    return next((family for family in FAMILIES if attention_backend.lower().startswith(family)), "gqa")


def make_backend(
    family: str,
    numbers: Mapping[str, int],
    *,
    num_layers: int,
    block_size: int,
    dtype: str,
    quant_type: str | None,
    scale_dtype: str,
) -> AttentionCacheBackend:
    """For one rank. `numbers`: fields of `CacheGeometry`. `dtype`: the model's. Raises `ConfigError`."""
    if quant_type == INT4 and "head_dim" in numbers:
        numbers = {**numbers, "head_dim": numbers["head_dim"] // 2}
    geometry = CacheGeometry(
        num_layers=num_layers,
        block_size=block_size,
        dtype=dtype if quant_type is None else "uint8",
        scale_dtype=scale_dtype if quant_type == BLOCK_WISE_FP8 else None,
        **numbers,
    )
    return make_cache_backend(family, geometry)


def _default_dtype() -> str:
    import paddle

    return str(paddle.get_default_dtype())


def _expect_shapes(name: str, layout: CacheLayout, shapes: Sequence[Sequence[int]]) -> None:
    """`shapes`: FastDeploy's of key, value and indexer, `[]` for a missing one; it derives scales itself."""
    ours = [(1, *role.block_shape) for role in layout.roles if not role.role.endswith("_scale")]
    asked = [tuple(shape) for shape in shapes if shape]
    if ours != asked:
        raise ConfigError(
            f"{name} asks for cache blocks of {asked}, our layout has {ours}: choose another FD_ATTENTION_BACKEND"
        )
