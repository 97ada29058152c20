"""Patch functions of engine and configuration against FAKE objects of FastDeploy."""

import argparse
import asyncio
import math
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1.attention.base import CacheLayout, RoleSpec
from fastdeploy_kvcache_v1.config import WritePolicy
from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.fastdeploy_integration import config_patches, settings
from fastdeploy_kvcache_v1.fastdeploy_integration.engine import patches as engine_patches
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay.capabilities import Capabilities
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay.table import table_for
from tests.storage.attention_store.stand_in import SDK


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in (settings.POLICY_VARIABLE, settings.THRESHOLD_VARIABLE, settings.BLOCK_BYTES_VARIABLE):
        monkeypatch.delenv(name, raising=False)


OUR_ARGUMENTS = {
    "write_policy": None,
    "write_through_threshold": None,
    "eviction_policy": "adaptive",
    "kvcache_storage_dir": None,
    "kvcache_storage_gib": 10.0,
    "storage_prefetch": "timeout",
}


@dataclass
class EngineArgs:
    write_policy: str = "write_through"
    splitwise_role: str = "mixed"
    enable_prefix_caching: bool = True
    is_cuda: bool = True

    def __post_init__(self):
        if self.splitwise_role == "decode" or not self.is_cuda:
            self.enable_prefix_caching = False


def test_engine_args_get_our_fields_and_a_decode_server_has_prefix_caching_where_another_one_has_it():
    config_patches.add_arguments(EngineArgs)
    names = [field.name for field in fields(EngineArgs)]
    assert [name for name in names if name in OUR_ARGUMENTS] == list(OUR_ARGUMENTS)
    assert {name: getattr(EngineArgs, name) for name in OUR_ARGUMENTS} == OUR_ARGUMENTS, "as of any dataclass"
    assert {name: value for name, value in asdict(EngineArgs()).items() if name in OUR_ARGUMENTS} == OUR_ARGUMENTS
    made = EngineArgs(write_policy="write_back", write_through_threshold=5)
    assert (made.write_policy, made.write_through_threshold) == ("write_back", 5)
    for given, is_cuda, expected in ((True, True, True), (False, True, False), (True, False, False)):
        made = EngineArgs(splitwise_role="decode", enable_prefix_caching=given, is_cuda=is_cuda)
        assert (made.splitwise_role, made.enable_prefix_caching) == ("decode", expected)


def test_command_line():
    parser = argparse.ArgumentParser()
    parser.add_argument("--write-policy", choices=["write_through"], default="write_through")
    config_patches.add_cli_arguments(lambda given: given, None, (parser,), {})
    assert vars(parser.parse_args([])) == OUR_ARGUMENTS
    words = "--write-policy write_back --write-through-threshold 7 --kvcache-storage-dir d --kvcache-storage-gib 1.5"
    chosen = parser.parse_args([*words.split(), "--storage-prefetch", "best_effort", "--eviction-policy", "lru"])
    assert list(vars(chosen).values()) == ["write_back", 7, "lru", "d", 1.5, "best_effort"]


def cache_config(**given):
    """Made as FastDeploy makes its own: arguments become attributes."""
    config = SimpleNamespace(
        write_policy=None, write_through_threshold=None, swap_space=None, kvcache_storage_backend=None
    )
    config_patches.init_cache_config(vars(config).update, config, (given,), {})
    return config


def test_workers_read_the_settings_from_the_environment(monkeypatch):
    assert cache_config().write_policy == "auto"
    assert settings.host_block_bytes() is None
    environment = {}
    settings.export(WritePolicy.WRITE_BACK, 3, 4096, environment)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    config = cache_config()
    assert (config.write_policy, config.write_through_threshold) == ("write_back", 3)
    assert settings.write_policy("write_through", None, stores=False) is WritePolicy.WRITE_THROUGH
    assert settings.host_block_bytes() == 4096
    settings.export(WritePolicy.WRITE_BACK, 3, None, environment)
    monkeypatch.setenv(settings.BLOCK_BYTES_VARIABLE, environment[settings.BLOCK_BYTES_VARIABLE])
    assert settings.host_block_bytes() is None, "an engine that sizes nothing leaves nothing of one before it"


@pytest.mark.parametrize(
    ("given", "sized"),
    [
        ({}, False),
        ({"swap_space": None}, False),
        ({"swap_space": 0.0}, False),
        ({"swap_space": 4.0}, True),
        ({"swap_space": 4.0, "num_cpu_blocks": None}, True),
        ({"swap_space": 4.0, "num_cpu_blocks": 7}, False),
        ({"num_cpu_blocks": 7}, False),
    ],
)
def test_who_decides_the_number_of_host_blocks(given, sized):
    assert cache_config(**given).sized_by_swap_space is sized


@pytest.mark.parametrize("amount", [math.nan, math.inf, -math.inf, -1.0])
def test_no_amount_of_memory_is_refused_before_fastdeploy_computes_with_it(amount):
    def fastdeploy_computes(args):
        raise AssertionError("int(nan) says nothing of a flag")

    with pytest.raises(ConfigError, match=f"--swap-space must be a number of GiB, 0 or more, got {amount}"):
        config_patches.init_cache_config(fastdeploy_computes, SimpleNamespace(), ({"swap_space": amount},), {})


@pytest.mark.parametrize("threshold", [0, -1, "many"])
def test_thresholds_that_cannot_work(threshold):
    with pytest.raises(ConfigError, match="--write-through-threshold must be a whole number of at least 1"):
        settings.write_through_threshold(threshold)
    assert settings.write_through_threshold(1) == 1


def fd_config(
    *,
    role="mixed",
    storage=None,
    host_blocks=0,
    swap=False,
    quant=None,
    routing=False,
    method=None,
    ranks=1,
    cached=True,
    graph_level=0,
):
    return SimpleNamespace(
        graph_opt_config=SimpleNamespace(graph_opt_level=graph_level),
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        worker_num_per_node=8,
        cache_config=SimpleNamespace(
            num_cpu_blocks=host_blocks,
            kvcache_storage_backend=storage,
            sized_by_swap_space=swap,
            enable_prefix_caching=cached,
        ),
        speculative_config=SimpleNamespace(method=method),
        scheduler_config=SimpleNamespace(splitwise_role=role),
        quant_config=None,
        model_config=SimpleNamespace(quantization={"kv_cache_quant_type": quant} if quant else None),
        routing_replay_config=SimpleNamespace(enable_routing_replay=routing),
    )


FACTS = {
    "fastdeploy": replace(table_for("2.6"), capabilities=Capabilities(flash_block_wise_fp8=True)),
    "v1_scheduler": True,
    "attention_backend": "APPEND_ATTN",
    "whole_prompts": True,
    "foreign_platform": None,
    "pd_via_storage": False,
}
NO_FLASH_FP8 = {"fastdeploy": replace(table_for("2.6"), capabilities=Capabilities())}
CHUNKED_DSA = "DSA_ATTN with prefix caching or prompts in chunks (its prefill attends to the tokens of its own pass"


@pytest.mark.parametrize(
    ("config", "facts", "reason"),
    [
        ({"storage": "file"}, {}, "--kvcache-storage-backend file without --swap-space"),
        ({"storage": "file", "swap": True, "ranks": 16}, {}, "file with tensor parallelism over several machines"),
        ({"storage": "file", "swap": True}, {"pd_via_storage": True}, "FD_PD_TRANSFER_VIA_STORAGE=1"),
        ({}, {"v1_scheduler": False}, "V0 scheduler"),
        ({}, {"foreign_platform": "xpu"}, "xpu platform"),
        ({}, {"attention_backend": "PLAS_ATTN"}, "PLAS_ATTN (it keeps means of key blocks outside"),
        ({}, {"attention_backend": "NATIVE_ATTN"}, "NATIVE_ATTN (FastDeploy cannot make it"),
        ({}, {"attention_backend": "DSA_ATTN"}, CHUNKED_DSA),
        ({"cached": False}, {"attention_backend": "DSA_ATTN", "whole_prompts": False}, CHUNKED_DSA),
        ({"quant": "block_wise_fp8"}, {"attention_backend": "MLA_ATTN"}, "MLA attention with block_wise_fp8"),
        ({"graph_level": 1}, {"attention_backend": "MLA_ATTN"}, "MLA_ATTN with graph_opt_level 1"),
        ({"method": "mtp"}, {"attention_backend": "MLA_ATTN"}, "speculative method mtp with MLA_ATTN"),
        ({"quant": "block_wise_fp8"}, {"attention_backend": "FLASH_ATTN", **NO_FLASH_FP8}, "FLASH_ATTN with block"),
        ({"routing": True, "host_blocks": 4}, {}, "routing replay with --swap-space"),
        ({"routing": True, "swap": True}, {}, "routing replay with --swap-space"),
        ({"method": "mtp", "cached": False}, {"attention_backend": "DSA_ATTN"}, "speculative method mtp with DSA_ATTN"),
        ({"host_blocks": 9}, {}, None),
        ({"storage": "file", "host_blocks": 9}, {}, None),
        ({"storage": "attention_store"}, {}, None),
        ({"storage": "attention_store", "host_blocks": 9, "method": "mtp"}, {}, None),
        ({"storage": "file", "swap": True, "ranks": 8}, {}, None),
        ({"quant": "block_wise_fp8"}, {"attention_backend": "FLASH_ATTN"}, None),
        ({"quant": "block_wise_fp8"}, NO_FLASH_FP8, None),
        ({"quant": "int8"}, {"attention_backend": "MLA_ATTN"}, None),
        ({"host_blocks": 9}, {"attention_backend": "MLA_ATTN", "whole_prompts": False}, None),
        ({"method": "ngram"}, {"attention_backend": "MLA_ATTN", "whole_prompts": False}, None),
        ({"graph_level": 1}, {}, None),
        ({"routing": True}, {}, None),
        ({"method": "ngram", "swap": True, "cached": False}, {"attention_backend": "DSA_ATTN"}, None),
        ({"cached": False}, {"attention_backend": "DSA_ATTN"}, None),
        ({}, {"whole_prompts": False}, None),
        ({}, {"fastdeploy": table_for("2.5")}, None),
    ],
)
def test_what_is_refused_and_why(config, facts, reason):
    refused = config_patches.refusals(fd_config(**config), **{**FACTS, **facts})
    assert len(refused) == (reason is not None)
    assert all(reason in each for each in refused)


@pytest.fixture
def postprocess(install, monkeypatch):
    """FastDeploy has processed its configuration. Returns what `refusals` was asked; `envs` and `layout` are FAKE."""
    envs = SimpleNamespace(
        ENABLE_V1_KVCACHE_SCHEDULER=1, FD_ATTENTION_BACKEND="APPEND_ATTN", FD_DISABLE_CHUNKED_PREFILL=False
    )
    made = SimpleNamespace(asked=None, envs=envs, refused=[], layout=None, sized=[], platform=None)

    def refusals(config, **facts):
        made.asked = facts
        return made.refused

    def run(*, backend=None, host_blocks=0, graphs=None):
        install({"fastdeploy": {"envs": envs}, "fastdeploy.platforms": {"current_platform": made.platform}})
        cache = {"kvcache_storage_backend": backend, "kvcache_storage_gib": 1.0, "kvcache_storage_dir": "/unused"}
        cache |= {"storage_prefetch": "timeout", "sized_by_swap_space": False, "num_cpu_blocks": host_blocks}
        config, processed = SimpleNamespace(cache_config=SimpleNamespace(**cache), graph_opt_config=graphs), []
        config_patches.postprocess_config(lambda: processed.append(True), config, (), {})
        assert processed == [True]
        assert made.sized[-1:] == [(config, envs.FD_ATTENTION_BACKEND)]

    monkeypatch.setattr(config_patches.overlay, "active", lambda: SimpleNamespace(table="the table"))
    monkeypatch.setattr(config_patches, "refusals", refusals)
    monkeypatch.setattr(config_patches, "host_layout", lambda *_: made.layout)
    monkeypatch.setattr(config_patches, "size_host_tier", lambda *given: made.sized.append(given))
    made.run = run
    return made


@pytest.mark.parametrize(
    ("is_installed", "flush_only", "roles", "reason"),
    [
        (False, False, ("key", "value"), "needs the package attentionstore_sdk"),
        (False, True, ("key", "value"), "needs the package attentionstore_sdk"),
        (True, False, ("key",), "moves blocks of a key and a value of the same size, the model's cache has key of"),
        (True, False, ("key", "value"), None),
        (True, True, ("key",), None),
    ],
)
def test_attention_store_needs_its_sdk_and_where_data_moves_a_key_and_a_value(
    postprocess, monkeypatch, is_installed, flush_only, roles, reason
):
    postprocess.layout = CacheLayout(1, tuple(RoleSpec(role, (1, 8), "uint8") for role in roles))
    if is_installed:
        monkeypatch.syspath_prepend(str(SDK))
    monkeypatch.setenv("FD_AS_ONLY_FLUSH", str(int(flush_only)))
    with nullcontext() if reason is None else pytest.raises(ConfigError, match=reason):
        postprocess.run(backend="attention_store")


def test_a_configuration_is_refused_with_every_reason(postprocess):
    postprocess.refused = ["this", "that"]
    with pytest.raises(ConfigError, match="ENABLE_V1_KVCACHE_MANAGER=1 cannot serve this: this; that"):
        postprocess.run()


@pytest.mark.parametrize(
    ("envs", "platform", "expected"),
    [
        ({}, None, {}),
        ({"ENABLE_V1_KVCACHE_SCHEDULER": "0"}, None, {"v1_scheduler": False}),
        ({"FD_ATTENTION_BACKEND": "MLA_ATTN"}, None, {"attention_backend": "MLA_ATTN"}),
        ({"FD_DISABLE_CHUNKED_PREFILL": True}, None, {"whole_prompts": True}),
        ({"FD_DISABLE_CHUNKED_PREFILL": True, "FD_DETERMINISTIC_MODE": True}, None, {}),
        ({"FD_PD_TRANSFER_VIA_STORAGE": 1}, None, {"pd_via_storage": True}),
        ({}, "is_maca", {"foreign_platform": "maca"}),
        ({}, "is_cuda", {}),
    ],
)
def test_what_decides_whether_a_configuration_is_refused(postprocess, envs, platform, expected):
    vars(postprocess.envs).update(envs)
    postprocess.platform = platform and SimpleNamespace(**{platform: lambda: True, "is_xpu": lambda: False})
    postprocess.run()
    usual = {
        "fastdeploy": "the table",
        "v1_scheduler": True,
        "attention_backend": "APPEND_ATTN",
        "whole_prompts": False,
    }
    assert postprocess.asked == {**usual, "foreign_platform": None, "pd_via_storage": False, **expected}


@pytest.mark.parametrize(
    ("host_blocks", "attention_backend", "is_on"),
    [(0, "APPEND_ATTN", True), (1, "APPEND_ATTN", False), (0, "MLA_ATTN", False)],
)
def test_prefills_that_wait_for_layers_or_read_a_prefix_are_not_captured(
    postprocess, caplog, host_blocks, attention_backend, is_on
):
    graphs = SimpleNamespace(cudagraph_only_prefill=True)
    postprocess.envs.FD_ATTENTION_BACKEND = attention_backend
    for _ in range(2):
        postprocess.run(host_blocks=host_blocks, graphs=graphs)
    assert graphs.cudagraph_only_prefill is is_on
    assert [message.partition(":")[0] for message in caplog.messages] == ["cudagraph_only_prefill is switched off"] * (
        not is_on
    )
    postprocess.run(host_blocks=host_blocks)


def test_roles_have_refusals_of_their_own():
    config = fd_config(role="decode")
    config.parallel_config.data_parallel_size = 2
    config.scheduler_config.name, config.router_config = "local", SimpleNamespace(router="127.0.0.1:9000")
    config.load_config = SimpleNamespace(dynamic_load_weight=False)
    assert any("data parallelism" in reason for reason in config_patches.refusals(config, **FACTS))


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        (None, ["worker"]),
        (["worker", "cache_transfer"], ["worker"]),
        (["cache_transfer"], []),
        ({"worker"}, ["worker"]),
    ],
)
def test_nobody_waits_for_the_transfer_process(given, asked):
    async def wrapped(request_id, timeout, executors=None):
        return request_id, timeout, executors

    waiting = engine_patches.wait_for_control_responses(wrapped, None, ("id", 60), {"executors": given})
    assert asyncio.run(waiting) == ("id", 60, asked)


def test_requests_pass_through_pause():
    def _control_pause(request):
        return request

    request = object()
    assert engine_patches.control_with_request(_control_pause, None, (request,), {}) is request
    assert engine_patches.control_with_request(_control_pause, None, (), {"control_request": request}) is request
