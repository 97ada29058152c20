"""`create_kv_cache` for the host's attention backends: our layouts, checked against the shapes the host asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..attention.base import AttentionCacheBackend, CacheLayout
from ..attention.dsa import DSACacheBackend
from ..attention.gqa import GQACacheBackend
from ..attention.mla import MLACacheBackend
from ..errors import ConfigError

BLOCK_WISE_FP8 = "block_wise_fp8"

MLA, DSA = "MLA_ATTN", "DSA_ATTN"
"""Attention backends by the host's names. All others keep a key and a value per head."""

_KINDS = {"MLAAttentionBackend": MLA, "DSAAttentionBackend": DSA}


def add_create_kv_cache(attention_backend: Any) -> None:
    """Extends the host's base class of attention backends."""
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
    """Method of a host's attention backend: zero-filled cache tensors by name, in the order its kernels index them.

    `dtype` is that of the model; quantized caches are uint8. Raises `ConfigError` for a combination whose kernels do
    not agree with the layout.
    """
    made = cache_layout(self, num_layers, dtype=dtype, quant_type=quant_type)
    return made.create_kv_cache(num_blocks, rank=rank, device=device, first_layer=first_layer)


def cache_layout(backend: Any, num_layers: int, *, dtype: str, quant_type: str | None) -> AttentionCacheBackend:
    """Our layout for a host's backend object. Raises `ConfigError`."""
    name = type(backend).__name__
    scale_dtype = _default_dtype() if quant_type == BLOCK_WISE_FP8 else dtype
    made = make_backend(
        _KINDS.get(name, name), backend, num_layers, dtype=dtype, quant_type=quant_type, scale_dtype=scale_dtype
    )
    _expect_host_shapes(name, made.layout, backend.get_kv_cache_shape(max_num_blocks=1, kv_cache_quant_type=quant_type))
    return made


def make_backend(
    kind: str, sizes: Any, num_layers: int, *, dtype: str, quant_type: str | None, scale_dtype: str
) -> AttentionCacheBackend:
    """Our layout for one rank. `sizes` has the attributes of the host's backend of that kind. Raises `ConfigError`."""
    stored = dtype if quant_type is None else "uint8"
    if kind == DSA:
        return DSACacheBackend(
            num_layers, sizes.kv_lora_rank, sizes.qk_rope_head_dim, sizes.index_head_dim, sizes.block_size
        )
    if kind == MLA:
        if quant_type == BLOCK_WISE_FP8:
            raise ConfigError("MLA attention with block_wise_fp8: its kernels expect one tensor per layer")
        return MLACacheBackend(num_layers, sizes.kv_lora_rank, sizes.qk_rope_head_dim, sizes.block_size, stored)
    head_dim = sizes.head_dim // 2 if quant_type == "int4_zp" else sizes.head_dim
    scales = scale_dtype if quant_type == BLOCK_WISE_FP8 else None
    return GQACacheBackend(num_layers, sizes.kv_num_heads, head_dim, sizes.block_size, stored, scale_dtype=scales)


def _default_dtype() -> str:
    import paddle

    return str(paddle.get_default_dtype())


def _expect_host_shapes(name: str, layout: CacheLayout, shapes: Sequence[Sequence[int]]) -> None:
    """The host names key, value and indexer shapes, `[]` for those it has not; scales it derives itself."""
    ours = [(1, *role.block_shape) for role in layout.roles if not role.role.endswith("_scale")]
    hosts = [tuple(shape) for shape in shapes if shape]
    if ours != hosts:
        raise ConfigError(f"{name} wants cache blocks of {hosts}, its layout has {ours}")
