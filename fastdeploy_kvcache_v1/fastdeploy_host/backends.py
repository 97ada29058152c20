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
    stored = dtype if quant_type is None else "uint8"
    made: AttentionCacheBackend
    if name == "DSAAttentionBackend":
        made = DSACacheBackend(
            num_layers, backend.kv_lora_rank, backend.qk_rope_head_dim, backend.index_head_dim, backend.block_size
        )
    elif name == "MLAAttentionBackend":
        if quant_type == BLOCK_WISE_FP8:
            raise ConfigError("MLA attention with block_wise_fp8: its kernels expect one tensor per layer")
        made = MLACacheBackend(num_layers, backend.kv_lora_rank, backend.qk_rope_head_dim, backend.block_size, stored)
    else:
        scale_dtype = _default_dtype() if quant_type == BLOCK_WISE_FP8 else None
        head_dim = backend.head_dim // 2 if quant_type == "int4_zp" else backend.head_dim
        made = GQACacheBackend(
            num_layers, backend.kv_num_heads, head_dim, backend.block_size, stored, scale_dtype=scale_dtype
        )
    _expect_host_shapes(name, made.layout, backend.get_kv_cache_shape(max_num_blocks=1, kv_cache_quant_type=quant_type))
    return made


def _default_dtype() -> str:
    import paddle

    return str(paddle.get_default_dtype())


def _expect_host_shapes(name: str, layout: CacheLayout, shapes: Sequence[Sequence[int]]) -> None:
    """The host names key, value and indexer shapes, `[]` for those it has not; scales it derives itself."""
    ours = [(1, *role.block_shape) for role in layout.roles if not role.role.endswith("_scale")]
    hosts = [tuple(shape) for shape in shapes if shape]
    if ours != hosts:
        raise ConfigError(f"{name} wants cache blocks of {hosts}, its layout has {ours}")
