"""Cache layout of grouped-query attention (multi-head attention included): one key and one value tensor per layer."""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError
from .base import AttentionCacheBackend, CacheLayout, RoleSpec, tensor_name

GQA_DTYPES = ("float32", "float16", "bfloat16")


class GQACacheBackend(AttentionCacheBackend):
    """Key and value, each `[num_blocks, num_kv_heads, block_size, head_dim]` per layer.

    Raises `ConfigError` for a dtype outside `GQA_DTYPES` or a size below 1. Only `create_kv_cache` needs paddle; it
    allocates on paddle's current device.
    """

    def __init__(self, num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: str) -> None:
        if num_layers < 1:
            raise ConfigError(f"num_layers must be at least 1, got {num_layers}")
        if dtype not in GQA_DTYPES:
            raise ConfigError(f"unsupported cache dtype {dtype!r}: choose one of {', '.join(GQA_DTYPES)}")
        shape = (num_kv_heads, block_size, head_dim)
        self._layout = CacheLayout(num_layers, (RoleSpec("key", shape, dtype), RoleSpec("value", shape, dtype)))

    @property
    def layout(self) -> CacheLayout:
        return self._layout

    def create_kv_cache(self, num_blocks: int, *, rank: int = 0, device: int = 0) -> dict[str, Any]:
        if num_blocks < 1:
            raise ConfigError(f"the device cache needs at least 1 block, got {num_blocks}")
        import paddle

        return {
            tensor_name(role.role, layer, rank, device): paddle.zeros([num_blocks, *role.block_shape], dtype=role.dtype)
            for layer in range(self._layout.num_layers)
            for role in self._layout.roles
        }
