"""Cache layout of grouped-query attention (multi-head attention included): one key and one value tensor per layer."""

from __future__ import annotations

from ..errors import ConfigError
from .base import AttentionCacheBackend, CacheLayout, RoleSpec

GQA_DTYPES = ("float32", "float16", "bfloat16", "uint8")
"""uint8 holds quantized caches: fp8, int8, or two int4 values in one byte (with half the head dimension)."""


class GQACacheBackend(AttentionCacheBackend):
    """Key and value, each `[num_blocks, num_kv_heads, block_size, head_dim]` per layer.

    With `scale_dtype` (block-wise fp8) also a scale per token and head for each: `[num_blocks, num_kv_heads,
    block_size]`. Raises `ConfigError` for a dtype outside `GQA_DTYPES` or a size below 1.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: str,
        *,
        scale_dtype: str | None = None,
    ) -> None:
        if dtype not in GQA_DTYPES:
            raise ConfigError(f"unsupported cache dtype {dtype!r}: choose one of {', '.join(GQA_DTYPES)}")
        shape = (num_kv_heads, block_size, head_dim)
        roles = [RoleSpec("key", shape, dtype), RoleSpec("value", shape, dtype)]
        if scale_dtype is not None:
            roles += [RoleSpec(role, shape[:2], scale_dtype) for role in ("key_scale", "value_scale")]
        super().__init__(CacheLayout(num_layers, tuple(roles)))
