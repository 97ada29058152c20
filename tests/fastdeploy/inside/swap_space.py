"""--swap-space through FastDeploy's real command line and configuration objects, against what its real attention
backends say that a block of the model looks like on a rank.
"""

import json
import re
from pathlib import Path

import paddle
import pytest

import fastdeploy
from fastdeploy.config import CacheConfig
from fastdeploy.engine import args_utils
from fastdeploy.utils import FlexibleArgumentParser
from fastdeploy_kvcache_v1.fastdeploy_integration.backends import cache_backend
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay import overlay
from tests.fastdeploy.inside.backends import backend_classes, make

QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 1024,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 264,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
DEEPSEEK = {
    **QWEN,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "index_head_dim": 128,
    "index_n_heads": 4,
    "index_topk": 64,
}
FP8 = {"quantization_config": {"quantization": "mix_quant", "kv_cache_quant_type": "block_wise_fp8"}}
INT4 = {"quantization_config": {"quantization": "mix_quant", "kv_cache_quant_type": "int4_zp"}}
WHOLE, UNCACHED = "FD_DISABLE_CHUNKED_PREFILL=1", "--no-enable-prefix-caching"
"""Sparse attention is refused without both. What begins with FD_ is a variable of the environment."""
SERVED_IN_CHUNKS = {"FD_DISABLE_CHUNKED_PREFILL": "0", "FD_DETERMINISTIC_MODE": "0"}
MTP = json.dumps({"method": "mtp", "num_speculative_tokens": 1, "model": "."})


GIVEN_BYTES = int(1.5 * 1024**3)
GQA_BLOCK = 6 * 2 * 4 * 64 * 64 * 2
FP8_BLOCK = 6 * 2 * 2 * 64 * (64 + 2)
LATENT_BLOCK = 6 * 576 * 64 * 2
MTP_FLAG = ["--speculative-config", MTP]


def ranks(number):
    return ["--tensor-parallel-size", str(number)]


SERVED = {
    "gqa": (QWEN, "APPEND_ATTN", [], GQA_BLOCK),
    "gqa_2_ranks": (QWEN, "FLASH_MASK_ATTN", ranks(2), GQA_BLOCK // 2),
    "gqa_4_ranks": (QWEN, "APPEND_ATTN", ranks(4), GQA_BLOCK // 4),
    "gqa_8_ranks": (QWEN, "FLASH_ATTN", ranks(8), GQA_BLOCK // 4),
    "gqa_mtp": (QWEN, "APPEND_ATTN", MTP_FLAG, GQA_BLOCK // 6 * 7),
    "gqa_fp8": (QWEN | FP8, "APPEND_ATTN", ranks(2), FP8_BLOCK),
    "flash_fp8": (QWEN | FP8, "FLASH_ATTN", ranks(2), FP8_BLOCK),
    "flash_mask_fp8": (QWEN | FP8, "FLASH_MASK_ATTN", ranks(2), FP8_BLOCK),
    "gqa_int4": (QWEN | INT4, "APPEND_ATTN", [], GQA_BLOCK // 4),
    "mla": (DEEPSEEK, "MLA_ATTN", [], LATENT_BLOCK),
    "mla_4_ranks": (DEEPSEEK, "MLA_ATTN", ranks(4), LATENT_BLOCK),
    "dsa": (DEEPSEEK, "DSA_ATTN", [WHOLE, UNCACHED, *ranks(8)], 6 * (656 + 132) * 64),
}
"""Model, attention backend, flags; bytes of a block on a rank."""
PLAIN_HEADS = {"gqa", "gqa_2_ranks", "gqa_4_ranks"}
"""Where FastDeploy's own formula is right."""
CHUNKED_DSA = "DSA_ATTN with prefix caching or prompts in chunks (its prefill attends only to tokens of its own pass"
REFUSED = {
    "too_small": (
        QWEN,
        "APPEND_ATTN",
        ["--swap-space", "0.0001"],
        "--swap-space 0.0001 GiB is less than one block: it takes 393216 bytes",
    ),
    "negative": (QWEN, "APPEND_ATTN", ["--swap-space=-1"], "--swap-space must be a number of at least 0, got -1.0"),
    "native": (QWEN, "NATIVE_ATTN", [], "NATIVE_ATTN (FastDeploy cannot make it for a GPU)"),
    "plas": (QWEN, "PLAS_ATTN", [], "PLAS_ATTN (it keeps means of key blocks outside the cache)"),
    "dsa_split": (DEEPSEEK, "DSA_ATTN", [WHOLE, "FD_DETERMINISTIC_MODE=1", UNCACHED], CHUNKED_DSA),
    "dsa_cached": (DEEPSEEK, "DSA_ATTN", [WHOLE], CHUNKED_DSA),
    "dsa_chunked": (DEEPSEEK, "DSA_ATTN", [UNCACHED], CHUNKED_DSA),
    "dsa_default": (DEEPSEEK, "DSA_ATTN", [], CHUNKED_DSA),
    "mla_mtp": (DEEPSEEK, "MLA_ATTN", MTP_FLAG, "speculative method mtp with MLA_ATTN or DSA_ATTN"),
    "mla_graphs": (DEEPSEEK, "MLA_ATTN", ["--graph-optimization-config", '{"graph_opt_level":1}'], "graph_opt_level 1"),
    "dsa_mtp": (DEEPSEEK, "DSA_ATTN", [WHOLE, UNCACHED, *MTP_FLAG], "speculative method mtp with MLA_ATTN or DSA_ATTN"),
}
"""Model, attention backend, flags; what the refusal says."""
BACKENDS = {
    "APPEND_ATTN": "AppendAttentionBackend",
    "FLASH_ATTN": "FlashAttentionBackend",
    "FLASH_MASK_ATTN": "FlashMaskAttentionBackend",
    "MLA_ATTN": "MLAAttentionBackend",
    "DSA_ATTN": "DSAAttentionBackend",
}


class Cuda:
    """FastDeploy's platform, but for the answer that lets it keep its V1 scheduler."""

    def __getattr__(self, name):
        return getattr(fastdeploy.platforms.current_platform, name)

    def is_cuda(self):
        return True


def rank_block_bytes(config, attention_backend):
    """From the shapes of FastDeploy's own backend with the attributes that the model runner gives it."""
    model, ranks = config.model_config, config.parallel_config.tensor_parallel_size
    backend = make(backend_classes()[BACKENDS[attention_backend]])
    for name in ("head_dim", "kv_lora_rank", "qk_rope_head_dim", "index_head_dim"):
        setattr(backend, name, getattr(model, name, None))
    backend.kv_num_heads = max(1, int(model.num_key_value_heads) // ranks)
    backend.block_size = config.cache_config.block_size
    quant_type = (model.quantization_config or {}).get("kv_cache_quant_type")
    layers = model.num_hidden_layers + config.speculative_config.num_extra_cache_layer
    paddle.set_default_dtype(model.dtype)  # as workers do
    if attention_backend == "DSA_ATTN":
        quant_type = "uint8"
    return cache_backend(backend, layers, dtype=model.dtype, quant_type=quant_type).layout.block_bytes


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    """Where the model is; a FastDeploy that believes to have a GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(args_utils, "current_platform", Cuda())


@pytest.fixture
def configure(monkeypatch):
    def configured(model, attention_backend, flags):
        if attention_backend in BACKENDS and BACKENDS[attention_backend] not in backend_classes():
            pytest.skip(f"this release has no {attention_backend}")
        variables = dict(flag.split("=") for flag in flags if flag.startswith("FD_"))
        for name, value in {"FD_ATTENTION_BACKEND": attention_backend, **SERVED_IN_CHUNKS, **variables}.items():
            monkeypatch.setenv(name, value)
        Path("config.json").write_text(json.dumps(model), encoding="utf-8")
        parser = args_utils.EngineArgs.add_cli_args(FlexibleArgumentParser())
        options = ["--model", ".", "--max-model-len", "2048", "--swap-space", "1.5", "--num-gpu-blocks-override", "64"]
        given = [flag for flag in flags if not flag.startswith("FD_")]
        return args_utils.EngineArgs.from_cli_args(parser.parse_args([*options, *given])).create_engine_config()

    return configured


def unserved(name):
    """Why a release has no tier for a case: it hands the backend the scales of another layer."""
    table = overlay.active().table
    if name in ("flash_fp8", "flash_mask_fp8") and not table.capabilities.flash_block_wise_fp8:
        return f"block_wise_fp8 without APPEND_ATTN in FastDeploy {table.release}"
    return None


@pytest.mark.parametrize(
    ("name", "model", "attention_backend", "flags", "block_bytes"), [(n, *c) for n, c in SERVED.items()]
)
def test_the_tier_is_as_large_as_asked_in_real_bytes_of_all_ranks(
    configure, name, model, attention_backend, flags, block_bytes
):
    if (reason := unserved(name)) is not None:
        with pytest.raises(ValueError, match=re.escape(reason)):
            configure(model, attention_backend, flags)
        return
    config = configure(model, attention_backend, flags)
    cache, num_ranks = config.cache_config, config.parallel_config.tensor_parallel_size
    assert rank_block_bytes(config, attention_backend) == cache.host_block_bytes == block_bytes
    assert cache.num_cpu_blocks == GIVEN_BYTES // (block_bytes * num_ranks)
    told = CacheConfig({"num_cpu_blocks": cache.num_cpu_blocks, "block_size": cache.block_size})
    assert told.num_cpu_blocks == cache.num_cpu_blocks, "a worker takes the engine's number"
    fastdeploys = int(GIVEN_BYTES / cache.bytes_per_block)
    assert (fastdeploys == cache.num_cpu_blocks) == (name in PLAIN_HEADS), "if it becomes right, our formula can go"


def test_without_swap_space_there_is_no_tier(configure):
    assert configure(QWEN, "APPEND_ATTN", ["--swap-space", "0"]).cache_config.num_cpu_blocks == 0


@pytest.mark.parametrize(("model", "attention_backend", "flags", "line"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_work_is_one_line_at_start(configure, model, attention_backend, flags, line):
    with pytest.raises(ValueError, match=re.escape(line)):
        configure(model, attention_backend, flags)


OURS = {
    "write_policy": "write_through_selective",
    "write_through_threshold": 3,
    "eviction_policy": "lru",
    "kvcache_storage_backend": "file",
    "kvcache_storage_dir": "kv",
    "kvcache_storage_gib": 2,
    "storage_prefetch": "best_effort",
}


def test_our_flags_come_through_fastdeploys_file_and_the_command_line_wins(configure):
    Path("flags.yml").write_text(json.dumps(OURS), encoding="utf-8")  # JSON is YAML
    cache = configure(QWEN, "APPEND_ATTN", ["--config", "flags.yml", "--write-through-threshold", "5"]).cache_config
    assert {name: getattr(cache, name) for name in OURS} == OURS | {"write_through_threshold": 5}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("write_policy", "never"),
        ("write_through_threshold", "many"),
        ("eviction_policy", "oldest"),
        ("kvcache_storage_backend", "tape"),
        ("kvcache_storage_gib", 0),
        ("storage_prefetch", "soon"),
    ],
)
def test_a_wrong_value_in_fastdeploys_file_is_refused(configure, name, value):
    Path("flags.yml").write_text(json.dumps(OURS | {name: value}), encoding="utf-8")
    with pytest.raises(ValueError, match=f"^--{name.replace('_', '-')} must be .*, got "):
        configure(QWEN, "APPEND_ATTN", ["--config", "flags.yml"])
