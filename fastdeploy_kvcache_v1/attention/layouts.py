"""The cache layout of each attention family: a class and a row of `FAMILIES`.

The first paragraph of a class is its row in docs/lab/server.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter, signature

from ..config import one_of
from ..errors import ConfigError
from .base import AttentionCacheBackend, CacheLayout, RoleSpec

GQA_DTYPES = ("float32", "float16", "bfloat16", "uint8")
"""uint8 holds fp8, int8, or two int4 values in one byte (with half the head dimension)."""
QUANT_BLOCK, SCALE_BYTES = 128, 4
"""A float32 scale for each block of quantized values."""
ROPE_BYTES = 2
"""The rotary part stays in bfloat16."""


@dataclass(frozen=True, kw_only=True)
class CacheGeometry:
    """One rank's part of a model. Numbers that the model lacks are None."""

    num_layers: int
    """Layers with a cache, draft layers included if their blocks are swapped with the others."""
    block_size: int
    """Tokens of one block."""
    dtype: str
    """Of cached values; uint8 if quantized."""
    scale_dtype: str | None = None
    """Of quantization scales that are cached beside the values."""
    num_kv_heads: int | None = None
    """Of this rank."""
    head_dim: int | None = None
    """Elements of `dtype` per head and token: half of the model's where a byte holds two int4 values."""
    kv_lora_rank: int | None = None
    qk_rope_head_dim: int | None = None
    index_head_dim: int | None = None


class GQACacheBackend(AttentionCacheBackend):
    """A key and a value per head. With block-wise fp8 also a scale for each token and head.

    Grouped-query attention, multi-head included. Key and value are `[num_blocks, num_kv_heads, block_size, head_dim]`
    each; with `scale_dtype` their scales are `[num_blocks, num_kv_heads, block_size]`. Raises `ConfigError` for a
    dtype outside `GQA_DTYPES` or a size below 1.
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
        one_of("the cache dtype", GQA_DTYPES, dtype)
        shape = (num_kv_heads, block_size, head_dim)
        roles = [RoleSpec("key", shape, dtype), RoleSpec("value", shape, dtype)]
        if scale_dtype is not None:
            roles += [RoleSpec(role, shape[:2], scale_dtype) for role in ("key_scale", "value_scale")]
        super().__init__(CacheLayout(num_layers, tuple(roles)))


class MLACacheBackend(AttentionCacheBackend):
    """One latent vector and its rotated part, shared by all heads, as in DeepSeek-V2.

    One tensor per layer, `[num_blocks, 1, block_size, kv_lora_rank + qk_rope_head_dim]`, in the role of the key. The
    same on every tensor-parallel rank, because the latent vector is not split.
    """

    def __init__(self, num_layers: int, kv_lora_rank: int, qk_rope_head_dim: int, block_size: int, dtype: str) -> None:
        shape = (1, block_size, kv_lora_rank + qk_rope_head_dim)
        super().__init__(CacheLayout(num_layers, (RoleSpec("key", shape, dtype),)))


class DSACacheBackend(AttentionCacheBackend):
    """An fp8 latent vector with scales and a bfloat16 rotated part; the indexer's fp8 key with its scale, as in
    DeepSeek-V3.2. The cache's dtype does not matter.

    Raises `ConfigError` unless both quantized lengths are multiples of 128.
    """

    def __init__(
        self, num_layers: int, kv_lora_rank: int, qk_rope_head_dim: int, index_head_dim: int, block_size: int
    ) -> None:
        for name, size in (("kv_lora_rank", kv_lora_rank), ("index_head_dim", index_head_dim)):
            if size < QUANT_BLOCK or size % QUANT_BLOCK:
                raise ConfigError(f"{name} must be a multiple of {QUANT_BLOCK}, got {size}")
        latent = kv_lora_rank + kv_lora_rank // QUANT_BLOCK * SCALE_BYTES + qk_rope_head_dim * ROPE_BYTES
        index = index_head_dim + index_head_dim // QUANT_BLOCK * SCALE_BYTES
        roles = (RoleSpec("key", (1, block_size, latent), "uint8"), RoleSpec("indexer", (block_size, index), "uint8"))
        super().__init__(CacheLayout(num_layers, roles))


FAMILIES: dict[str, Callable[..., AttentionCacheBackend]] = {
    "gqa": GQACacheBackend,
    "mla": MLACacheBackend,
    "dsa": DSACacheBackend,
}
"""A constructor's parameters are fields of `CacheGeometry`; those without a default are needed."""

OF_EVERY_FAMILY = ("num_layers", "block_size", "dtype")


def make_cache_backend(family: str, geometry: CacheGeometry) -> AttentionCacheBackend:
    """Make the backend of `family`; allocates nothing. A family without a `dtype` has a format of its own.

    Raises `ConfigError` for an unknown family, a needed number that is None, a number that the layout refuses, or
    scales that it would not cache.
    """
    needed, parameters = needed_numbers(family), _parameters(family)
    if missing := [name for name in needed if getattr(geometry, name) is None]:
        raise ConfigError(
            f"the model's configuration lacks {', '.join(missing)}, needed by the attention family {family}"
        )
    if geometry.scale_dtype is not None and "dtype" in parameters and "scale_dtype" not in parameters:
        raise ConfigError(f"attention family {family} caches no scales: choose another dtype of the cache")
    return FAMILIES[family](**{name: getattr(geometry, name) for name in parameters})


def needed_numbers(family: str) -> tuple[str, ...]:
    """Name the fields of `CacheGeometry` that `family` needs besides `OF_EVERY_FAMILY`, in its constructor's order.

    Raises `ConfigError` for an unknown family.
    """
    required = (name for name, each in _parameters(family).items() if each.default is Parameter.empty)
    return tuple(name for name in required if name not in OF_EVERY_FAMILY)


def _parameters(family: str) -> dict[str, Parameter]:
    one_of("the attention family", FAMILIES, family)
    return dict(signature(FAMILIES[family]).parameters)
