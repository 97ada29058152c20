"""Run inside a FastDeploy process: what the name of stored blocks has of FastDeploy's real configuration and variables.

Prints the digest of each case; then, of each setting, whether it is IN the name or OUT of it, and which are WRONG.
"""

import enum
import json
import os
import sys
from pathlib import Path
from unittest import mock

from fastdeploy_kvcache_v1 import plugin

plugin.activate()

from fastdeploy import envs  # noqa: E402
from fastdeploy.engine import args_utils  # noqa: E402
from fastdeploy.entrypoints.openai.utils import make_arg_parser  # noqa: E402
from fastdeploy.utils import FlexibleArgumentParser  # noqa: E402
from fastdeploy_kvcache_v1.fastdeploy_integration import config_patches  # noqa: E402
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.storage_namespace import VARIABLES, settings_digest  # noqa: E402
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay import overlay  # noqa: E402
from tests.fastdeploy.drive_swap_space import QWEN, Cuda  # noqa: E402

MOE = QWEN | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "moe_num_experts": 8,
}
ROLE = ["--router", "127.0.0.1:1", "--scheduler-name", "local"]
PORTS = ["--port", "8123", "--metrics-port", "8124", "--engine-worker-queue-port", "8125", "--cache-queue-port", "8126"]


def engine_config(model, flags):
    """As the API server makes it, which has flags beside those of the engine."""
    Path("config.json").write_text(json.dumps(model), encoding="utf-8")
    options = [
        "--model",
        str(Path.cwd()),
        "--max-model-len",
        "2048",
        "--swap-space",
        "1.5",
        "--num-gpu-blocks-override",
        "64",
    ]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args([*options, *flags])
    return args_utils.EngineArgs.from_cli_args(args, skip_port_check=True).create_engine_config()


def digest(flags=(), variables=(), model=QWEN):
    with mock.patch.dict(os.environ, variables):
        return settings_digest(engine_config(model, flags), envs.environment_variables)


def show(case, *args, **kwargs):
    print("CASE", case, digest(*args, **kwargs))


def cases(has):
    show("plain")
    show("ports", PORTS, {"FD_LOG_DIR": "elsewhere", "CUDA_VISIBLE_DEVICES": "3", "FD_HOST_NAME": "b", "FD_DEBUG": "1"})
    show("sizes", ["--max-num-seqs", "16", "--gpu-memory-utilization", "0.5", "--num-gpu-blocks-override", "128"])
    show("store", ["--kvcache-storage-backend", "file", "--kvcache-storage-dir", "kv", "--write-policy", "write_back"])
    show("model_impl", ["--model-impl", "paddleformers"])
    show("tensor_parallel", ["--tensor-parallel-size", "2"])
    show("custom_all_reduce", ["--disable-custom-all-reduce"])
    show("graph", ["--graph-optimization-config", '{"graph_opt_level": 1}'])
    for name, value in {
        "FD_MOE_BACKEND": "triton",
        "FD_USE_DEEP_GEMM": "1",
        "FD_FP8_QUANT_WITH_POW2SCALE": "1",
        "FD_DETERMINISTIC_MODE": "1",
        "FLAGS_flash_attn_version": "3",
        "USE_DECODE_UNIFIED_ATTENTION": "1",
        "NVIDIA_TF32_OVERRIDE": "0",
        "FD_OF_A_LATER_RELEASE": "1",
    }.items():
        show(name, (), {name: value})
    show("moe", model=MOE)
    show("moe_expert_parallel", ["--enable-expert-parallel", "--tensor-parallel-size", "2"], model=MOE)
    show("moe_tensor_parallel", ["--tensor-parallel-size", "2"], model=MOE)
    if has("moe_gate_fp32"):
        show("moe_gate_fp32", ["--moe-gate-fp32"])
    if has("enable_flashinfer_allreduce_fusion"):
        show("allreduce_fusion", ["--enable-flashinfer-allreduce-fusion"])
    draft = {"method": "mtp", "num_speculative_tokens": 2, "model": str(Path.cwd())}
    show("mtp", ["--speculative-config", json.dumps(draft)])
    config_patches.role_refusals = lambda config: {}  # of a GPU, which this FastDeploy believes to have
    for role in ("prefill", "decode"):
        show(role, ["--splitwise-role", role, *ROLE])


def objects(value, left_out, found):
    """Everything with fields in what the name has of a configuration, and what is left out of each."""
    if isinstance(value, (type, enum.Enum)) or callable(value) or not hasattr(value, "__dict__"):
        return
    name = f"{type(value).__module__}:{type(value).__qualname__}"
    found.append((name, value, left_out.get(name, ())))
    for field, each in vars(value).items():
        if field not in left_out.get(name, ()):
            objects(each, left_out, found)


def fields():
    """Changes one setting at a time."""
    left_out = overlay.active().table.not_in_names
    config = engine_config(QWEN, [])
    config.cache_config.reset(500)  # as FastDeploy does once it has measured how many blocks fit
    whole, found = settings_digest(config, envs.environment_variables), []
    print("CASE profiled", whole)
    objects(config, left_out, found)
    for name, value, unnamed in found:
        for field in [*vars(value), "of_a_later_release"]:
            before = vars(value).copy()
            vars(value)[field] = "changed"
            report(f"{name}.{field}", settings_digest(config, envs.environment_variables) != whole, field in unnamed)
            vars(value).clear()
            vars(value).update(before)
    for variable in envs.environment_variables:
        names = []
        for setting in ({}, {variable: "1234567"}):
            with mock.patch.dict(os.environ, setting):
                names.append(settings_digest(config, envs.environment_variables))
        report(variable, names[0] != names[1], variable in left_out[VARIABLES])


def report(setting, is_in_name, is_left_out):
    print("IN" if is_in_name else "OUT", setting)
    if is_in_name == is_left_out:
        print("WRONG", setting)


def main():
    args_utils.current_platform = Cuda()
    os.environ["FD_ATTENTION_BACKEND"] = "APPEND_ATTN"
    Path(sys.argv[1]).mkdir(exist_ok=True)
    os.chdir(sys.argv[1])
    if sys.argv[2:] == ["again"]:
        cases({}.__contains__)
        return
    cases(args_utils.EngineArgs.__dataclass_fields__.__contains__)
    fields()


main()
