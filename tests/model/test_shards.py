"""A model on several ranks computes what it computes on one, bit by bit."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.model import shards
from fastdeploy_kvcache_v1.model.config import RANDOM_MODELS, ModelConfig
from fastdeploy_kvcache_v1.model.decoder import Decoder
from fastdeploy_kvcache_v1.model.plan import FIXED_TILES, SequenceSlice
from fastdeploy_kvcache_v1.model.weights import load_weights
from tests.embedded.engine.family_engine import BLOCK, FAMILIES, model_of, rank_group
from tests.model.test_ranks import on_all

TOKENS = np.arange(150, dtype=np.int64) * 7 % 250
QWEN = replace(
    RANDOM_MODELS["gqa"], architecture="qwen3", num_layers=2, num_heads=6, num_kv_heads=3, qk_norm=True, qkv_bias=True
)
MODELS = {name: (model_of(name, mtp=False), dtype) for name, (_, dtype) in FAMILIES.items()}
MODELS["qwen"] = (QWEN, "float16")


def run(model: Decoder, config: ModelConfig, dtype: str):
    """Logits of two prompts in chunks and of some tokens behind them; the bytes of all caches."""
    caches = list(config.cache_backend(block_size=BLOCK, dtype=dtype).create_kv_cache(60).values())
    tables, logits = [list(range(30)), list(range(59, 29, -1))], []
    for start, end in ((0, 61), (61, 140), (140, 141), (141, 142), (142, 150)):
        slices = [SequenceSlice((TOKENS + shift)[start:end], start, table) for shift, table in enumerate(tables)]
        logits += model.forward(slices, caches)
    return logits, [cache.numpy() for cache in caches]


@cache
def on_one(name):
    config, dtype = MODELS[name]
    return run(Decoder.load(None, config), config, dtype)


def on_ranks(name, size, cut=None):
    config, dtype = MODELS[name]
    ranks = rank_group(size)
    weights = load_weights(None, config)
    models = [Decoder(weights, config, cut, each) for each in ranks]
    outcomes = on_all(ranks, lambda each: run(models[each.rank], config.shard(size), dtype))
    for each in ranks:
        each.close()
    return outcomes


@pytest.mark.parametrize(("name", "size"), [*((name, 2) for name in FAMILIES), ("gqa", 4), ("mla", 4), ("qwen", 3)])
def test_logits_and_caches_are_those_of_one_rank(name, size):
    logits, caches = on_one(name)
    outcomes = on_ranks(name, size)
    for rank_logits, _ in outcomes:
        assert all(np.array_equal(mine, other) for mine, other in zip(rank_logits, logits, strict=True))
    for index, whole in enumerate(caches):
        parts = [rank_caches[index] for _, rank_caches in outcomes]
        if MODELS[name][0].latent is None:
            assert np.array_equal(np.concatenate(parts, axis=1), whole), "each rank has its heads"
        else:
            assert all(np.array_equal(part, whole) for part in parts), "latent vectors are whole on each rank"


@pytest.mark.parametrize("name", ["gqa", "mla"])
def test_also_where_the_library_gets_rows_in_fixed_tiles(name):
    config, dtype = MODELS[name]
    logits, _ = run(Decoder(load_weights(None, config), config, FIXED_TILES), config, dtype)
    for rank_logits, _ in on_ranks(name, 2, FIXED_TILES):
        assert all(np.array_equal(mine, other) for mine, other in zip(rank_logits, logits, strict=True))


def test_a_latent_cache_is_as_large_on_each_rank_and_heads_are_shared():
    for name, (config, dtype) in MODELS.items():
        if config.num_heads % 2 == 0 and config.num_kv_heads in (1, 4):
            one, two = (config.shard(size).cache_backend(block_size=8, dtype=dtype).layout for size in (1, 2))
            assert one.block_bytes == two.block_bytes * (2 if config.latent is None else 1), name


@pytest.mark.parametrize("where", ["_projects_alike", "_attends_alike"])
@pytest.mark.parametrize("name", ["gqa", "dsa"])
def test_a_library_whose_heads_depend_on_each_other_is_refused(monkeypatch, name, where):
    """It would change tokens without a sign."""
    config, _ = MODELS[name]
    weights = load_weights(None, config).layers[0].attention
    shards.require_heads_stand_alone(weights, config, FIXED_TILES, 2)
    if where == "_attends_alike":
        attend = shards.attend

        def depends(queries, keys, values, mask):
            return attend(queries, keys, values, mask) + 1e-7 * queries.shape[0] * queries.shape[1]

        monkeypatch.setattr(shards, "attend", depends)
    else:
        family = shards.family_of(config)

        def spoiled(weights, config, rank, size):
            own = family.shard(weights, config, rank, size)
            field = "qkv" if config.latent is None else "queries_latent"
            return replace(own, **{field: getattr(own, field) * np.float32(1 + 1e-6)})

        monkeypatch.setattr(shards, "family_of", lambda config: replace(family, shard=spoiled))
    with pytest.raises(ConfigError, match="leave out --tensor-parallel-size"):
        shards.require_heads_stand_alone(weights, config, FIXED_TILES, 2)
