"""Namespace: everything that decides a block's bytes, beside its tokens. Blocks of two namespaces never meet."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

from ..attention.base import CacheLayout
from ..contract.messages import BlockHash
from .base import StoreKey

__all__ = ["FORMAT_VERSION", "Namespace", "block_key"]

FORMAT_VERSION = 2
"""Of what is stored, and under which key."""


@dataclass(frozen=True)
class Namespace:
    """What the manifest of a namespace says."""

    model: str
    """Digest of the weights and of the settings that decide what they compute."""
    weight_epoch: str
    """Changes with every weight update of a running server."""
    layout: CacheLayout
    """Of one rank, draft layers included."""
    block_size: int
    tensor_parallel_size: int
    implementation: str
    """Whose kernels computed the blocks, and their layout inside a block."""
    hash_version: str
    """Of the block hashes (`scheduler/block_hashing.py`)."""
    num_parts: int = 1
    """Values of each block, see `Parts`."""
    format_version: int = FORMAT_VERSION

    def manifest(self) -> str:
        """All of it as JSON, the same text for the same namespace."""
        return json.dumps(asdict(self), sort_keys=True, indent=1)

    @property
    def digest(self) -> str:
        """32 hexadecimal digits."""
        return hashlib.sha256(self.manifest().encode()).hexdigest()[:32]


def block_key(block: BlockHash, part: int) -> StoreKey:
    return StoreKey(f"{block.hex()}.{part}")
