"""The numbers of a model that decide what its cache looks like on one rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CacheGeometry:
    """One rank's part of a model. A number that the model lacks is None; each attention family needs some of them."""

    num_layers: int
    """Those with a cache. Draft layers count when their blocks are swapped with the others."""
    block_size: int
    """Tokens of one block."""
    dtype: str
    """Of cached values; uint8 for quantized ones."""
    scale_dtype: str | None = None
    """Of quantization scales that are cached beside the values; None where none are."""
    num_kv_heads: int | None = None
    """Of this rank."""
    head_dim: int | None = None
    """Elements of `dtype` for each head and token: half of the model's where a byte holds two int4 values."""
    kv_lora_rank: int | None = None
    qk_rope_head_dim: int | None = None
    index_head_dim: int | None = None
