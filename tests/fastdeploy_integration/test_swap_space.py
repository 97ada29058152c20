"""How many host blocks --swap-space buys, for every cache layout, without FastDeploy: FAKE configurations."""

import logging
from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.fastdeploy_integration import swap_space
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.patches import EnginePrefixCache
from fastdeploy_kvcache_v1.fastdeploy_integration.swap_space import GIB

from .fd_configs import fd_config

BLOCK = 64
GQA = {"num_key_value_heads": 8, "head_dim": 128}
LATENT = {"num_key_value_heads": 128, "head_dim": 192, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
SPARSE = {**LATENT, "index_head_dim": 128}

GQA_BYTES = 2 * 8 * 128 * BLOCK * 2
"""Key and value, all heads, bfloat16, one layer."""


def config_of(sizes, *, ranks=1, quant=None, swap=None, **given):
    return fd_config(
        num_hidden_layers=10, block_size=BLOCK, tensor_parallel_size=ranks, swap_space=swap,
        quantization_config={"kv_cache_quant_type": quant} if quant else None,
        **{"sized_by_swap_space": swap is not None, **sizes, **given},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "options", "backend", "expected"),
    [
        (GQA, {}, "APPEND_ATTN", 10 * GQA_BYTES),
        (GQA, {}, "FLASH_ATTN", 10 * GQA_BYTES),
        (GQA, {"dtype": "float32"}, "APPEND_ATTN", 10 * GQA_BYTES * 2),
        (GQA, {"ranks": 4}, "APPEND_ATTN", 10 * GQA_BYTES // 4),
        (GQA, {"ranks": 16}, "APPEND_ATTN", 10 * GQA_BYTES // 8),  # one head on each rank, each head on two
        (GQA, {"method": "mtp"}, "APPEND_ATTN", 11 * GQA_BYTES),
        (GQA, {"method": "ngram"}, "APPEND_ATTN", 10 * GQA_BYTES),
        (GQA, {"quant": "int8"}, "APPEND_ATTN", 10 * GQA_BYTES // 2),
        (GQA, {"quant": "float8_e4m3fn_zp"}, "APPEND_ATTN", 10 * GQA_BYTES // 2),
        (GQA, {"quant": "int4_zp"}, "APPEND_ATTN", 10 * GQA_BYTES // 4),
        # A scale per token and head for each of key and value, in the model's dtype.
        (GQA, {"quant": "block_wise_fp8"}, "APPEND_ATTN", 10 * (GQA_BYTES // 2 + 2 * 8 * BLOCK * 2)),
        (GQA, {"quant": "block_wise_fp8", "ranks": 2, "method": "mtp"}, "APPEND_ATTN", 11 * (GQA_BYTES + 4096) // 4),
        (LATENT, {}, "MLA_ATTN", 10 * 576 * BLOCK * 2),
        (LATENT, {"ranks": 8}, "MLA_ATTN", 10 * 576 * BLOCK * 2),  # the latent vector is not split
        (LATENT, {"quant": "int8", "method": "mtp"}, "MLA_ATTN", 11 * 576 * BLOCK),
        (LATENT, {}, "APPEND_ATTN", 10 * 2 * 128 * 192 * BLOCK * 2),  # a latent model run without its backend
        (SPARSE, {"ranks": 8}, "DSA_ATTN", 10 * (656 + 132) * BLOCK),
        (SPARSE, {"quant": "int8"}, "DSA_ATTN", 10 * (656 + 132) * BLOCK),
    ],
)
def test_bytes_of_a_block_on_one_rank(sizes, options, backend, expected):
    assert swap_space.host_layout(config_of(sizes, **options), backend).block_bytes == expected


def test_swap_space_is_what_all_ranks_take_together():
    for ranks in (1, 2, 4, 8, 16):
        for sizes, backend in ((GQA, "APPEND_ATTN"), (LATENT, "MLA_ATTN"), (SPARSE, "DSA_ATTN")):
            config = config_of(sizes, ranks=ranks, swap=3.7)
            swap_space.size_host_tier(config, backend)
            cache = config.cache_config
            block = cache.host_block_bytes * ranks
            assert cache.num_cpu_blocks * block <= 3.7 * GIB < (cache.num_cpu_blocks + 1) * block


def test_an_explicit_number_is_kept_and_sizing_again_gives_the_same():
    for cache, expected in (
        ({"num_cpu_blocks": 7, "host_block_bytes": None, "sized_by_swap_space": False}, (7, None)),
        ({}, (GIB // (10 * GQA_BYTES), 10 * GQA_BYTES)),
    ):
        config = config_of(GQA, swap=1.0, **cache)
        for _ in range(3):
            swap_space.size_host_tier(config, "APPEND_ATTN")
            assert (config.cache_config.num_cpu_blocks, config.cache_config.host_block_bytes) == expected


def test_exactly_one_block_is_enough_and_one_byte_less_is_an_error():
    assert swap_space.num_host_blocks(1.0, GIB // 4, 4) == 1
    with pytest.raises(ConfigError, match=r"--swap-space 1 GiB is less than one block.*each of 4 .* 1 GiB") as caught:
        swap_space.num_host_blocks(1.0, GIB // 4 + 1, 4)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("sizes", "backend", "missing"),
    [
        (GQA, "MLA_ATTN", "kv_lora_rank, qk_rope_head_dim"),
        (LATENT, "DSA_ATTN", "index_head_dim"),
        ({"head_dim": 8}, "APPEND_ATTN", "num_key_value_heads"),
    ],
)
def test_a_model_without_the_sizes_of_its_backend(sizes, backend, missing):
    with pytest.raises(ConfigError, match=f"the model's configuration lacks {missing}, which {backend} needs"):
        swap_space.host_layout(config_of(sizes), backend)


@pytest.mark.parametrize(
    ("worker", "model", "command_line", "expected"),
    [
        (None, None, None, None),
        (None, None, {"quantization": "wint8"}, None),
        (None, None, {"quantization": "mix_quant", "kv_cache_quant_type": "int8"}, "int8"),
        (None, {"kv_cache_quant_type": "int4_zp"}, {"kv_cache_quant_type": "int8"}, "int4_zp"),
        (None, {"quantization": "mix_quant"}, {"kv_cache_quant_type": "int8"}, None),
        (SimpleNamespace(kv_cache_quant_type="int8"), {"kv_cache_quant_type": "int4_zp"}, None, "int8"),
        (SimpleNamespace(), {"kv_cache_quant_type": "int4_zp"}, None, None),
    ],
)
def test_how_the_cache_is_quantized(worker, model, command_line, expected):
    config = config_of(GQA)
    config.quant_config = worker
    config.model_config.quantization_config, config.model_config.quantization = model, command_line
    assert swap_space.kv_cache_quant_type(config) == expected


@pytest.mark.parametrize(
    # Four ranks take 4 GiB together, and 1 GiB is free.
    ("chips", "cache", "needs"),
    [
        (8, {}, "on the 4 ranks of this machine needs 4.00 GiB, but 1.00"),
        (2, {}, "on the 2 ranks of this machine needs 2.00 GiB"),  # others have memory of their own
        (1, {}, None),
        (8, {"host_block_bytes": None}, None),  # nobody sized it
        (8, {"enable_prefix_caching": False}, None),
    ],
)
def test_memory_for_all_ranks_of_a_machine_is_asked_for_before_there_are_any(monkeypatch, chips, cache, needs):
    monkeypatch.setattr(swap_space, "free_host_memory", lambda: GIB)
    config = config_of(GQA, ranks=4, swap=4.0, enable_prefix_caching=True)
    swap_space.size_host_tier(config, "APPEND_ATTN")
    config.max_chips_per_node = chips
    vars(config.cache_config).update(cache)
    if needs is None:
        swap_space.require_host_memory(config)
    else:
        with pytest.raises(ConfigError, match=needs):
            EnginePrefixCache(config)


@pytest.mark.parametrize(("expected", "warned"), [(None, False), (1024, False), (512, True), (2048, True)])
def test_a_rank_that_takes_other_memory_says_so(caplog, expected, warned):
    with caplog.at_level(logging.WARNING):
        swap_space.compare(1024, expected, 2048)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warned
    if warned:
        (line,) = caplog.messages
        assert "takes 0.002 GiB on this rank" in line
        assert f"has 1024 bytes, the engine expected {expected}" in line
