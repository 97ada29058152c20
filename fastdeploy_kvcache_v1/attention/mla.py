"""Cache layout of multi-head latent attention: one latent vector per token, shared by all heads."""

from __future__ import annotations

from .base import AttentionCacheBackend, CacheLayout, RoleSpec


class MLACacheBackend(AttentionCacheBackend):
    """One tensor per layer, `[num_blocks, 1, block_size, kv_lora_rank + qk_rope_head_dim]`, in the role of the key.

    The same on every tensor-parallel rank, because the latent vector is not split.
    """

    def __init__(self, num_layers: int, kv_lora_rank: int, qk_rope_head_dim: int, block_size: int, dtype: str) -> None:
        shape = (1, block_size, kv_lora_rank + qk_rope_head_dim)
        super().__init__(CacheLayout(num_layers, (RoleSpec("key", shape, dtype),)))
