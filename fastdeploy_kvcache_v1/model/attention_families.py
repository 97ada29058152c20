"""The attention families of the reference models. A new one is a file and a line here."""

from __future__ import annotations

from typing import Any

from . import attention_dsa, attention_gqa, attention_mla
from .attention import Family
from .config import ModelConfig

FAMILIES: dict[str, Family[Any]] = {
    "gqa": Family(
        (2, 4),
        attention_gqa.read_weights,
        attention_gqa.GQAProjection,
        attention_gqa.GroupedQueryAttention,
        attention_gqa.shard_weights,
    ),
    "mla": Family(
        (1,),
        attention_mla.read_weights,
        attention_mla.MLAProjection,
        attention_mla.LatentAttention,
        attention_mla.shard_weights,
    ),
    "dsa": Family(
        (2,),
        attention_dsa.read_weights,
        attention_dsa.DSAProjection,
        attention_dsa.SparseAttention,
        attention_mla.shard_weights,
    ),
}
"""By the names of `fastdeploy_kvcache_v1.attention.registry`."""


def family_of(config: ModelConfig) -> Family[Any]:
    return FAMILIES[config.attention_family]
