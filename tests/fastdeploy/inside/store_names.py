"""What the name of stored blocks has of FastDeploy's real configuration and variables: all but what the table of its
release lists.
"""

import enum
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

import fastdeploy.config
from fastdeploy import envs
from fastdeploy.engine import args_utils
from fastdeploy.entrypoints.openai.utils import make_arg_parser
from fastdeploy.utils import FlexibleArgumentParser
from fastdeploy_kvcache_v1.fastdeploy_integration import refusals
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.storage_namespace import VARIABLES, settings_digest
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay import overlay
from tests.fastdeploy.inside.swap_space import QWEN, Cuda

MOE = QWEN | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
MOE |= {"num_experts": 8, "moe_num_experts": 8}
ROLE = ["--router", "127.0.0.1:1", "--scheduler-name", "local"]
SIZES = ["--max-num-seqs", "16", "--gpu-memory-utilization", "0.5", "--num-gpu-blocks-override", "128"]
PORTS = ["--port", "8123", "--metrics-port", "8124", "--engine-worker-queue-port", "8125", "--cache-queue-port", "8126"]


def engine_config(model, flags):
    """As the API server makes it, which has flags beside those of the engine."""
    Path("config.json").write_text(json.dumps(model), encoding="utf-8")
    options = ["--model", str(Path.cwd()), "--max-model-len", "2048", "--swap-space", "1.5"]
    options += ["--num-gpu-blocks-override", "64"]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args([*options, *flags])
    return args_utils.EngineArgs.from_cli_args(args, skip_port_check=True).create_engine_config()


def mtp(tokens=2, steps=1):
    draft = {"method": "mtp", "num_speculative_tokens": tokens, "num_model_steps": steps, "model": str(Path.cwd())}
    return ["--speculative-config", json.dumps(draft)]


def digest(flags=(), variables=(), model=QWEN):
    with mock.patch.dict(os.environ, variables):
        return settings_digest(engine_config(model, flags), envs.environment_variables)


def same_names():
    """Other addresses, sizes, policies or roles, under which the same model computes the same bytes."""
    elsewhere = {"FD_LOG_DIR": "elsewhere", "CUDA_VISIBLE_DEVICES": "3", "FD_HOST_NAME": "b", "FD_DEBUG": "1"}
    yield "ports", digest(PORTS, elsewhere)
    yield "sizes", digest(SIZES)
    store = ["--kvcache-storage-backend", "file", "--kvcache-storage-dir", "kv", "--write-policy", "write_back"]
    yield "store", digest(store)
    yield "graphs", digest(["--graph-optimization-config", '{"use_cudagraph": false}'])
    config = engine_config(QWEN, [])
    config.cache_config.reset(500)  # as FastDeploy does once it has measured how many blocks fit
    yield "profiled", settings_digest(config, envs.environment_variables)


def other_names():
    """Of what changes the numerics."""
    yield "plain", digest()
    yield "model_impl", digest(["--model-impl", "paddleformers"])
    yield "tensor_parallel", digest(["--tensor-parallel-size", "2"])
    yield "custom_all_reduce", digest(["--disable-custom-all-reduce"])
    yield "graph", digest(["--graph-optimization-config", '{"graph_opt_level": 1}'])
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
        yield name, digest((), {name: value})
    yield "moe", digest(model=MOE)
    yield "moe_expert_parallel", digest(["--enable-expert-parallel", "--tensor-parallel-size", "2"], model=MOE)
    yield "moe_tensor_parallel", digest(["--tensor-parallel-size", "2"], model=MOE)
    for flag in ("moe_gate_fp32", "enable_flashinfer_allreduce_fusion"):
        if flag in args_utils.EngineArgs.__dataclass_fields__:
            yield flag, digest([f"--{flag.replace('_', '-')}"])
    for tokens, steps in ((1, 1), (2, 1), (2, 2)):
        yield f"mtp {tokens} {steps}", digest(mtp(tokens, steps))
    yield "ngram", digest(["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}'])


def believe_in_cuda(set_attribute=setattr):
    """The configuration too: without a GPU no role replays graphs, and one that does not is not told apart."""
    for module in (args_utils, fastdeploy.config):
        set_attribute(module, "current_platform", Cuda())


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    """Where the model is; a FastDeploy that believes to have a GPU, on which nothing refuses roles."""
    monkeypatch.chdir(tmp_path)
    believe_in_cuda(monkeypatch.setattr)
    monkeypatch.setattr(refusals, "OF_ROLES", ())
    monkeypatch.setenv("FD_ATTENTION_BACKEND", "APPEND_ATTN")


def test_store_name_does_not_depend_on_ports_or_sizes():
    plain = digest()
    assert {case: name for case, name in same_names() if name != plain} == {}


@pytest.mark.parametrize("speculation", [(1, 1), (2, 1), (3, 3), None])
def test_one_deployment_has_one_name_whatever_the_role_of_a_server(speculation):
    flags = [] if speculation is None else mtp(*speculation)
    roles = {role: ["--splitwise-role", role, *ROLE, *flags] for role in ("prefill", "decode")} | {"mixed": flags}
    assert {role: engine_config(QWEN, options).graph_opt_config.use_cudagraph for role, options in roles.items()} == {
        "prefill": False, "decode": True, "mixed": True,
    }, "else this sees nothing"  # fmt: skip
    assert len({digest(options) for options in roles.values()}) == 1


def test_what_changes_the_numerics_changes_the_name():
    names = dict(other_names())
    assert len(names) >= 17
    assert len(set(names.values())) == len(names)


def test_store_name_survives_a_restart_and_another_model_directory(tmp_path):
    """In another process, where hashes of strings differ."""
    code = "from tests.fastdeploy.inside import store_names as here; here.print_names()"
    moved = tmp_path / "moved"
    moved.mkdir()
    variables = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=moved, env=variables, capture_output=True, text=True, timeout=300, check=True
    )
    names = json.loads(done.stdout.rpartition("NAMES ")[2])
    assert names == dict(other_names())


def print_names():
    believe_in_cuda()
    print("NAMES", json.dumps(dict(other_names())))


def objects(value, left_out, found):
    """Everything with fields in what the name has of a configuration, and what is left out of each."""
    if isinstance(value, (type, enum.Enum)) or callable(value) or not hasattr(value, "__dict__"):
        return
    name = f"{type(value).__module__}:{type(value).__qualname__}"
    found.append((name, value, left_out.get(name, ())))
    for field, each in vars(value).items():
        if field not in left_out.get(name, ()):
            objects(each, left_out, found)


def settings():
    """One is changed at a time: its name, whether that changes the name of blocks, whether the table leaves it out."""
    left_out = overlay.active().table.not_in_names
    config, found = engine_config(QWEN, []), []
    whole = settings_digest(config, envs.environment_variables)
    objects(config, left_out, found)
    for name, value, unnamed in found:
        for field in [*vars(value), "of_a_later_release"]:
            before = vars(value).copy()
            vars(value)[field] = "changed"
            yield f"{name}.{field}", settings_digest(config, envs.environment_variables) != whole, field in unnamed
            vars(value).clear()
            vars(value).update(before)
    for variable in envs.environment_variables:
        names = []
        for setting in ({}, {variable: "1234567"}):
            with mock.patch.dict(os.environ, setting):
                names.append(settings_digest(config, envs.environment_variables))
        yield variable, names[0] != names[1], variable in left_out[VARIABLES]


def test_each_setting_is_in_the_name_or_on_the_list():
    seen = list(settings())
    assert [name for name, is_in_name, is_left_out in seen if is_in_name == is_left_out] == []
    assert len(seen) > 400, "too little of FastDeploy is seen"
    assert ("fastdeploy.config:ModelConfig.of_a_later_release", True, False) in seen


def test_each_setting_on_the_list_is_one_of_the_release():
    assert overlay.active().lost_settings() == []
