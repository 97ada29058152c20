"""The contract of a cache layout: roles, shapes, dtypes and tensor names of one attention family."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..config import one_of
from ..errors import ConfigError

__all__ = ["DTYPE_BYTES", "ROLE_TENSOR_NAMES", "AttentionCacheBackend", "CacheLayout", "RoleSpec", "tensor_name"]

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "uint8": 1}

ROLE_TENSOR_NAMES = {
    "key": "key_caches",
    "value": "value_caches",
    "key_scale": "key_cache_scales",
    "value_scale": "value_cache_scales",
    "indexer": "indexer_caches",
}
"""Roles in their fixed order, with the prefix of their tensor names."""


@dataclass(frozen=True)
class RoleSpec:
    """One tensor of a layer: `[num_blocks, *block_shape]` of `dtype`."""

    role: str
    block_shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        one_of("the cache role", ROLE_TENSOR_NAMES, self.role)
        one_of("the cache dtype", DTYPE_BYTES, self.dtype)
        if not self.block_shape or min(self.block_shape) < 1:
            raise ConfigError(f"cache role {self.role} has an empty block shape {self.block_shape}")

    @property
    def block_bytes(self) -> int:
        return math.prod(self.block_shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class CacheLayout:
    """Cache tensors of one rank: `num_layers` times the same roles, in role order."""

    num_layers: int
    roles: tuple[RoleSpec, ...]

    def __post_init__(self) -> None:
        if self.num_layers < 1:
            raise ConfigError(f"num_layers must be at least 1, got {self.num_layers}")

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers and roles: one host slot."""
        return self.num_layers * sum(role.block_bytes for role in self.roles)


def tensor_name(role: str, layer: int, rank: int, device: int) -> str:
    """Name of one layer's tensor of `role`, the same in every release: `key_caches_3_rank0.device0`."""
    return f"{ROLE_TENSOR_NAMES[role]}_{layer}_rank{rank}.device{device}"


class AttentionCacheBackend:
    """Owner of a cache layout. Each attention family has a subclass, whose constructor makes the layout."""

    def __init__(self, layout: CacheLayout) -> None:
        self.layout = layout
        """Shapes, dtypes and order of the tensors of `create_kv_cache`."""

    def create_kv_cache(
        self, num_blocks: int, *, rank: int = 0, device: int = 0, first_layer: int = 0
    ) -> dict[str, Any]:
        """Make zero-filled tensors by `tensor_name`, in flat order: layer-major, roles in role order.

        Each tensor is `[num_blocks, *role.block_shape]` of the role's dtype, contiguous, on paddle's current device,
        and keeps its address until it is dropped. Layers count from `first_layer`: a draft model's layers follow the
        main model's. Raises `ConfigError` for `num_blocks < 1`.
        """
        if num_blocks < 1:
            raise ConfigError(f"the device cache needs at least 1 block, got {num_blocks}")
        import paddle

        return {
            tensor_name(role.role, first_layer + layer, rank, device): paddle.zeros(
                [num_blocks, *role.block_shape], dtype=role.dtype
            )
            for layer in range(self.layout.num_layers)
            for role in self.layout.roles
        }
