"""How many host blocks `--swap-space` buys: the bytes a block really takes on every rank, by our own cache layouts.

FastDeploy's own formula counts a key and a value of all heads, once. That is not what a rank keeps with latent caches
(the same on every rank), scales, packed int4, fewer heads than ranks, or draft layers.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from ..worker.runtime.base import free_host_memory, require
from .backends import DSA, MLA, make_backend

logger = logging.getLogger(__name__)

GIB = 1024**3

_SIZES = {
    MLA: ("kv_lora_rank", "qk_rope_head_dim"),
    DSA: ("kv_lora_rank", "qk_rope_head_dim", "index_head_dim"),
}
"""What decides a block's bytes, by attention backend, in the names of the host's model configuration."""

_GQA_SIZES = ("num_key_value_heads", "head_dim")


@dataclass(frozen=True, kw_only=True)
class CachedModel:
    """What decides the bytes of a block on one rank. `dtype` is the model's; sizes that its attention has not are 0."""

    attention_backend: str
    num_layers: int
    """Draft layers included: they are swapped with the others."""
    dtype: str
    quant_type: str | None
    block_size: int
    num_ranks: int
    num_key_value_heads: int = 0
    """Of the whole model."""
    head_dim: int = 0
    kv_lora_rank: int = 0
    qk_rope_head_dim: int = 0
    index_head_dim: int = 0

    @property
    def kv_num_heads(self) -> int:
        """On one rank: with more ranks than heads, ranks keep copies of the same one."""
        return max(1, self.num_key_value_heads // self.num_ranks)

    @property
    def block_bytes(self) -> int:
        """Of one host block on one rank. Raises `ConfigError` for a cache that no layout describes."""
        made = make_backend(
            self.attention_backend,
            self,
            self.num_layers,
            dtype=self.dtype,
            quant_type=self.quant_type,
            scale_dtype=self.dtype,
        )
        return made.layout.block_bytes


def cached_model(config: Any, attention_backend: str) -> CachedModel:
    """Read off an `FDConfig`. Raises `ConfigError` when its model lacks a size that the backend needs."""
    model = config.model_config
    names = _SIZES.get(attention_backend, _GQA_SIZES)
    sizes: dict[str, Any] = {name: getattr(model, name, None) for name in names}
    if missing := [name for name, size in sizes.items() if size is None]:
        raise ConfigError(
            f"--swap-space: {attention_backend} needs the model's {', '.join(missing)}, which its configuration has not"
        )
    return CachedModel(
        attention_backend=attention_backend,
        num_layers=int(model.num_hidden_layers) + has_draft_layer(config),
        dtype=str(model.dtype),
        quant_type=kv_cache_quant_type(config),
        block_size=int(config.cache_config.block_size),
        num_ranks=int(config.parallel_config.tensor_parallel_size),
        **{name: int(size) for name, size in sizes.items()},
    )


def has_draft_layer(config: Any) -> bool:
    """Whether a draft model's layer is cached as well: FastDeploy's draft models have one, whatever was trained."""
    speculative = config.speculative_config
    return speculative is not None and speculative.method == "mtp"


def kv_cache_quant_type(config: Any) -> str | None:
    """How the cache is quantized: as the worker's quantization object says; before there is one, as the model's own
    quantization says, which goes before that of the command line."""
    if config.quant_config is not None:
        return getattr(config.quant_config, "kv_cache_quant_type", None)
    for name in ("quantization_config", "quantization"):
        raw = getattr(config.model_config, name, None)
        if isinstance(raw, dict):
            return raw.get("kv_cache_quant_type")
    return None


def require_amount(gib: float) -> None:
    """Raises `ConfigError` for a number that is no amount of memory."""
    if not math.isfinite(gib) or gib < 0:
        raise ConfigError(f"--swap-space must be a number of GiB, 0 or more, got {gib}")


def num_host_blocks(gib: float, block_bytes: int, num_ranks: int) -> int:
    """Blocks of `block_bytes` on each of `num_ranks` ranks that fit into `gib` GiB together.

    Raises `ConfigError` for less than one block, and for a number that is no amount of memory.
    """
    require_amount(gib)
    blocks = int(gib * GIB) // (block_bytes * num_ranks)
    if blocks == 0:
        raise ConfigError(
            f"--swap-space {gib:g} GiB is less than one block: it takes {block_bytes} bytes on each of {num_ranks} "
            f"tensor-parallel ranks, {block_bytes * num_ranks / GIB:.4g} GiB. Ask for more, or leave the flag out"
        )
    return blocks


def size_host_tier(config: Any, attention_backend: str) -> None:
    """Set `num_cpu_blocks` of the cache configuration, unless it was given. Raises `ConfigError`.

    A worker is told the number and computes nothing: all ranks have the engine's.
    """
    cache = config.cache_config
    if cache.sized_by_swap_space:
        model = cached_model(config, attention_backend)
        cache.num_cpu_blocks = num_host_blocks(cache.swap_space, model.block_bytes, model.num_ranks)
        cache.host_block_bytes = model.block_bytes


def require_host_memory(config: Any) -> None:
    """Raises `ConfigError` when the tensor-parallel ranks of this machine cannot have their blocks all at once.

    Each rank asks for its own part only, and all ask at the same time: the free memory would be enough for each of
    them alone, and the system would then kill some.
    """
    cache = config.cache_config
    if cache.host_block_bytes is None or not cache.enable_prefix_caching:
        return
    num_ranks = min(config.parallel_config.tensor_parallel_size, config.max_chips_per_node)
    needed = cache.num_cpu_blocks * cache.host_block_bytes * num_ranks
    require(f"--swap-space on the {num_ranks} ranks of this machine", needed, free_host_memory())


def describe(gib: float, num_blocks: int, block_bytes: int, num_ranks: int) -> str:
    """One line for the log."""
    total = num_blocks * block_bytes * num_ranks / GIB
    return (
        f"--swap-space {gib:g} GiB: {num_blocks} host blocks of {block_bytes} bytes on each of {num_ranks} "
        f"tensor-parallel ranks, {total:.3f} GiB in all"
    )


def compare(allocated: int, expected: int | None, num_blocks: int) -> None:
    """A rank allocates `num_blocks` blocks of `allocated` bytes. Warns when the engine sized the tier by other bytes:
    the number is fixed by then, so the memory is not what was asked for. `expected` is None when it sized nothing."""
    if expected is not None and allocated != expected:
        logger.warning(
            "the host tier takes %.3f GiB on this rank, not its part of --swap-space, %.3f GiB: a block has %d bytes, "
            "the engine expected %d. The cache is correct; change --swap-space in proportion",
            num_blocks * allocated / GIB,
            num_blocks * expected / GIB,
            allocated,
            expected,
        )
