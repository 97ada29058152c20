"""Run inside a FastDeploy process without a GPU: its real command line and configuration objects count the host
blocks, its real attention backends say what a block of that model looks like on a rank, the worker's real configuration
takes the number over. Prints one line per case.
"""

import json
import os
from pathlib import Path

from fastdeploy_kvcache_v1 import plugin

plugin.activate()

import paddle  # noqa: E402

import fastdeploy  # noqa: E402
from fastdeploy import envs  # noqa: E402
from fastdeploy.config import CacheConfig  # noqa: E402
from fastdeploy.engine import args_utils  # noqa: E402
from fastdeploy.utils import FlexibleArgumentParser  # noqa: E402
from fastdeploy_kvcache_v1.fastdeploy_integration.backends import cache_backend  # noqa: E402
from tests.fastdeploy.drive_backends import backend_classes, make  # noqa: E402

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
"""Latent attention is refused without both. What begins with FD_ is a variable of the environment."""
SERVED_IN_CHUNKS = {"FD_DISABLE_CHUNKED_PREFILL": "0", "FD_DETERMINISTIC_MODE": "0"}
MTP = json.dumps({"method": "mtp", "num_speculative_tokens": 1, "model": "."})

CASES = {
    "gqa": (QWEN, "APPEND_ATTN", []),
    "gqa_2_ranks": (QWEN, "FLASH_MASK_ATTN", ["--tensor-parallel-size", "2"]),
    "gqa_4_ranks": (QWEN, "APPEND_ATTN", ["--tensor-parallel-size", "4"]),
    "gqa_8_ranks": (QWEN, "FLASH_ATTN", ["--tensor-parallel-size", "8"]),
    "gqa_mtp": (QWEN, "APPEND_ATTN", ["--speculative-config", MTP]),
    "gqa_fp8": (QWEN | FP8, "APPEND_ATTN", ["--tensor-parallel-size", "2"]),
    "flash_fp8": (QWEN | FP8, "FLASH_ATTN", ["--tensor-parallel-size", "2"]),
    "flash_mask_fp8": (QWEN | FP8, "FLASH_MASK_ATTN", ["--tensor-parallel-size", "2"]),
    "gqa_int4": (QWEN | INT4, "APPEND_ATTN", []),
    "mla": (DEEPSEEK, "MLA_ATTN", [WHOLE, UNCACHED, "--tensor-parallel-size", "4"]),
    "mla_mtp": (DEEPSEEK, "MLA_ATTN", [WHOLE, UNCACHED, "--speculative-config", MTP]),
    "dsa": (DEEPSEEK, "DSA_ATTN", [WHOLE, UNCACHED, "--tensor-parallel-size", "8"]),
    "dsa_mtp": (DEEPSEEK, "DSA_ATTN", [WHOLE, UNCACHED, "--speculative-config", MTP]),
    "mla_cached": (DEEPSEEK, "MLA_ATTN", [WHOLE]),
    "dsa_cached": (DEEPSEEK, "DSA_ATTN", [WHOLE]),
    "mla_chunked": (DEEPSEEK, "MLA_ATTN", [UNCACHED]),
    "dsa_chunked": (DEEPSEEK, "DSA_ATTN", [UNCACHED]),
    "mla_split": (DEEPSEEK, "MLA_ATTN", [WHOLE, "FD_DETERMINISTIC_MODE=1", UNCACHED]),
    "mla_default": (DEEPSEEK, "MLA_ATTN", []),
    "dsa_default": (DEEPSEEK, "DSA_ATTN", []),
    "plas": (QWEN, "PLAS_ATTN", []),
    "native": (QWEN, "NATIVE_ATTN", []),
    "too_small": (QWEN, "APPEND_ATTN", ["--swap-space", "0.0001"]),
    "nan": (QWEN, "APPEND_ATTN", ["--swap-space", "nan"]),
    "infinite": (QWEN, "APPEND_ATTN", ["--swap-space", "inf"]),
    "negative": (QWEN, "APPEND_ATTN", ["--swap-space=-1"]),
    "none": (QWEN, "APPEND_ATTN", ["--swap-space", "0"]),
}
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


def engine_config(model, flags):
    Path("config.json").write_text(json.dumps(model), encoding="utf-8")
    parser = args_utils.EngineArgs.add_cli_args(FlexibleArgumentParser())
    options = ["--model", ".", "--max-model-len", "2048", "--swap-space", "1.5", "--num-gpu-blocks-override", "64"]
    return args_utils.EngineArgs.from_cli_args(parser.parse_args([*options, *flags])).create_engine_config()


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


def run(name, model, attention_backend, flags):
    variables = dict(flag.split("=") for flag in flags if flag.startswith("FD_"))
    os.environ.update({"FD_ATTENTION_BACKEND": attention_backend, **SERVED_IN_CHUNKS, **variables})
    try:
        config = engine_config(model, [flag for flag in flags if not flag.startswith("FD_")])
    except ValueError as error:
        print("REFUSED", name, error)
        return
    cache = config.cache_config
    told = CacheConfig({"num_cpu_blocks": cache.num_cpu_blocks, "block_size": cache.block_size})
    print(
        "CASE",
        json.dumps(
            {
                "name": name,
                "blocks": cache.num_cpu_blocks,
                "told": told.num_cpu_blocks,
                "expected_bytes": cache.host_block_bytes,
                "real_bytes": rank_block_bytes(config, attention_backend) if cache.num_cpu_blocks else None,
                "ranks": config.parallel_config.tensor_parallel_size,
                "fastdeploys_formula": int(1.5 * 1024**3 / cache.bytes_per_block),
            }
        ),
    )


def main():
    args_utils.current_platform = Cuda()
    assert envs.ENABLE_V1_KVCACHE_SCHEDULER
    for name, (model, attention_backend, flags) in CASES.items():
        if attention_backend not in BACKENDS or BACKENDS[attention_backend] in backend_classes():
            run(name, model, attention_backend, flags)


if __name__ == "__main__":
    main()
