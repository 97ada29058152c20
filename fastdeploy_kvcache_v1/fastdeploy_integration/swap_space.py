"""The number of host blocks in `--swap-space`, by the bytes of a block on every rank in our cache layouts.

FastDeploy's formula counts a key and a value of all heads once. It is wrong for latent caches (whole on every rank),
scales, packed int4, fewer heads than ranks, and draft layers.
"""

from __future__ import annotations

import logging
from typing import Any

from ..attention.base import CacheLayout
from ..attention.layouts import needed_numbers
from ..config import GIB
from ..errors import ConfigError
from ..worker.runtime.base import free_host_memory, require
from .backends import family_of, make_backend

logger = logging.getLogger(__name__)

_IN_CONFIGURATION = {"num_kv_heads": "num_key_value_heads"}
"""Names in FastDeploy's model configuration of fields of `CacheGeometry`."""


def host_layout(config: Any, attention_backend: str) -> CacheLayout:
    """Of one rank's block, draft layer included. Raises `ConfigError` if the model lacks a number or no layout fits."""
    model, family = config.model_config, family_of(attention_backend)
    names = {number: _IN_CONFIGURATION.get(number, number) for number in needed_numbers(family)}
    if missing := [name for name in names.values() if getattr(model, name, None) is None]:
        raise ConfigError(
            f"--swap-space or storage: the model's configuration lacks {', '.join(missing)}, which {attention_backend} "
            "needs: choose another FD_ATTENTION_BACKEND, or leave the flags out"
        )
    numbers = {number: int(getattr(model, name)) for number, name in names.items()}
    if "num_kv_heads" in numbers:  # with more ranks than heads, several ranks have the same head
        numbers["num_kv_heads"] = max(1, numbers["num_kv_heads"] // _num_ranks(config))
    made = make_backend(
        family,
        numbers,
        num_layers=int(model.num_hidden_layers) + has_draft_layer(config),
        block_size=int(config.cache_config.block_size),
        dtype=str(model.dtype),
        quant_type=kv_cache_quant_type(config),
        scale_dtype=str(model.dtype),
    )
    return made.layout


def num_kv_heads(config: Any, attention_backend: str) -> int | None:
    """Of the whole model; None for a latent cache, whole on each rank."""
    if "num_kv_heads" not in needed_numbers(family_of(attention_backend)):
        return None
    return int(getattr(config.model_config, _IN_CONFIGURATION["num_kv_heads"]))


def block_bytes(config: Any, attention_backend: str) -> int:
    """Bytes of a block on all ranks together; 0 where no layout fits, which only copies refuse."""
    try:
        return host_layout(config, attention_backend).block_bytes * _num_ranks(config)
    except ConfigError:
        return 0


def _num_ranks(config: Any) -> int:
    return int(config.parallel_config.tensor_parallel_size)


def has_draft_layer(config: Any) -> bool:
    """FastDeploy's draft models cache one layer, even with more trained ones."""
    speculative = config.speculative_config
    return speculative is not None and speculative.method == "mtp"


def draft_tokens(config: Any) -> int:
    """Draft tokens of a row that one pass may verify; 0 without speculative decoding."""
    speculative = config.speculative_config
    return 0 if speculative is None or speculative.method is None else int(speculative.num_speculative_tokens)


def kv_cache_quant_type(config: Any) -> str | None:
    """Quantization of the cache: by the worker's quantization object or, before it exists, by the model's own
    quantization, which precedes that of the command line.
    """
    if config.quant_config is not None:
        return getattr(config.quant_config, "kv_cache_quant_type", None)
    for name in ("quantization_config", "quantization"):
        raw = getattr(config.model_config, name, None)
        if isinstance(raw, dict):
            return raw.get("kv_cache_quant_type")
    return None


def num_host_blocks(gib: float, block_bytes: int, num_ranks: int) -> int:
    """Blocks of `block_bytes` on each of `num_ranks` ranks in `gib` GiB. Raises `ConfigError` for 0."""
    blocks = int(gib * GIB) // (block_bytes * num_ranks)
    if blocks == 0:
        raise ConfigError(
            f"--swap-space {gib:g} GiB is less than one block: it takes {block_bytes} bytes on each of {num_ranks} "
            f"tensor-parallel ranks, {block_bytes * num_ranks / GIB:.4g} GiB. Ask for more, or leave the flag out"
        )
    return blocks


def size_host_tier(config: Any, attention_backend: str) -> None:
    """Set `num_cpu_blocks` in the engine, unless it was given; workers are told it. Raises `ConfigError`."""
    cache = config.cache_config
    if cache.sized_by_swap_space:
        cache.host_block_bytes = host_layout(config, attention_backend).block_bytes
        cache.num_cpu_blocks = num_host_blocks(cache.swap_space, cache.host_block_bytes, _num_ranks(config))


def require_host_memory(config: Any) -> None:
    """Raises `ConfigError` if the tensor-parallel ranks of this machine together need more than the free memory.

    Ranks allocate at the same time, so each would find enough for itself, and the system would kill some.
    """
    cache = config.cache_config
    if cache.host_block_bytes is None or not cache.enable_prefix_caching:
        return
    num_ranks = min(config.parallel_config.tensor_parallel_size, config.max_chips_per_node)
    needed = cache.num_cpu_blocks * cache.host_block_bytes * num_ranks
    require(f"--swap-space on the {num_ranks} ranks of this machine", needed, free_host_memory())


def describe(gib: float, num_blocks: int, block_bytes: int, num_ranks: int) -> str:
    total = num_blocks * block_bytes * num_ranks / GIB
    return (
        f"--swap-space {gib:g} GiB: {num_blocks} host blocks of {block_bytes} bytes on each of {num_ranks} "
        f"tensor-parallel ranks, {total:.3f} GiB in all"
    )


def compare(allocated: int, expected: int | None, num_blocks: int) -> None:
    """Warn if the engine sized the host tier by other bytes of a block than this rank has `allocated`: the number of
    blocks is fixed by then. `expected` is None if the engine sized nothing.
    """
    if expected is not None and allocated != expected:
        logger.warning(
            "the host tier takes %.3f GiB on this rank instead of its part of --swap-space, %.3f GiB: a block has %d "
            "bytes, the engine expected %d. The cache is correct; change --swap-space in proportion",
            num_blocks * allocated / GIB,
            num_blocks * expected / GIB,
            allocated,
            expected,
        )
