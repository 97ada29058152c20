"""Cache layout of sparse attention with an indexer: a quantized latent vector and a quantized indexer key per token."""

from __future__ import annotations

from ..errors import ConfigError
from .base import AttentionCacheBackend, CacheLayout, RoleSpec

SCALE_BYTES = 4
"""One float32 scale for every `QUANT_BLOCK` quantized values."""

QUANT_BLOCK = 128
ROPE_BYTES = 2
"""The rotary part stays in bfloat16."""


class DSACacheBackend(AttentionCacheBackend):
    """Bytes per token: `kv_lora_rank` fp8 values, their scales, and the rotary part; then the indexer's key and scales.

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
