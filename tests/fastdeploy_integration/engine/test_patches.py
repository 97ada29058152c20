"""Patch functions of engine and configuration against FAKE objects of FastDeploy."""

import argparse
import asyncio
import math
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1.attention.base import CacheLayout, RoleSpec
from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.fastdeploy_integration import config_patches, settings
from fastdeploy_kvcache_v1.fastdeploy_integration.engine import patches as engine_patches
from tests.fastdeploy_integration.fd_configs import fd_config
from tests.storage.attention_store.stand_in import SDK


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    monkeypatch.delenv(settings.BLOCK_BYTES_VARIABLE, raising=False)


OUR_ARGUMENTS = {"write_policy": None} | {flag.name: flag.default for flag in settings.ADDED_FLAGS}


@dataclass
class EngineArgs:
    write_policy: str = "write_through"
    splitwise_role: str = "mixed"
    enable_prefix_caching: bool = True
    kvcache_storage_backend: str | None = None
    is_cuda: bool = True

    def __post_init__(self):
        if self.splitwise_role == "decode" or not self.is_cuda:
            self.enable_prefix_caching = False
        if self.kvcache_storage_backend is not None and not self.enable_prefix_caching:
            raise NotImplementedError("a store needs prefix caching")


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
    made = EngineArgs(splitwise_role="decode", kvcache_storage_backend="file")
    assert (made.enable_prefix_caching, made.kvcache_storage_backend) == (True, "file")
    with pytest.raises(NotImplementedError, match="needs prefix caching"):
        EngineArgs(splitwise_role="decode", kvcache_storage_backend="file", is_cuda=False)


def test_the_command_line_has_our_flags_and_leaves_the_check_to_the_configuration():
    parser = argparse.ArgumentParser()
    parser.add_argument("--write-policy", choices=["write_through"], default="write_through")
    parser.add_argument("--kvcache-storage-backend", choices=["file"])
    config_patches.add_cli_arguments(lambda given: given, None, (parser,), {})
    assert vars(parser.parse_args([])) == OUR_ARGUMENTS | {"kvcache_storage_backend": None}
    words = "--write-policy write_back --write-through-threshold 7 --kvcache-storage-dir d --kvcache-storage-gib 1.5"
    chosen = parser.parse_args([*words.split(), "--storage-prefetch", "best_effort", "--eviction-policy", "oldest"])
    given = {"write_policy": "write_back", "write_through_threshold": 7, "eviction_policy": "oldest"}
    given |= {"kvcache_storage_dir": "d", "kvcache_storage_gib": 1.5, "storage_prefetch": "best_effort"}
    assert vars(chosen) == OUR_ARGUMENTS | {"kvcache_storage_backend": None} | given
    store = ["--kvcache-storage-backend", "mooncake"]
    assert parser.parse_args(store).kvcache_storage_backend == "mooncake", "any that the registry has"
    with pytest.raises(ConfigError, match=r"--eviction-policy must be one of adaptive, lru(, .*)?, got 'oldest'"):
        cache_config(**vars(chosen))


def cache_config(**given):
    """Made as FastDeploy makes its own: arguments become attributes."""
    config = SimpleNamespace(
        write_policy=None, write_through_threshold=None, swap_space=None, kvcache_storage_backend=None
    )
    config_patches.init_cache_config(vars(config).update, config, (given,), {})
    return config


def test_workers_read_the_settings_from_the_environment(monkeypatch):
    """Of the policy they need nothing."""
    assert (cache_config().write_policy, cache_config().write_through_threshold) == ("auto", 2)
    for block_bytes in (None, 4096, None):
        environment = {}
        settings.export(block_bytes, None, environment)
        monkeypatch.setenv(settings.BLOCK_BYTES_VARIABLE, environment[settings.BLOCK_BYTES_VARIABLE])
        assert settings.host_block_bytes() == block_bytes, "an engine that sizes nothing says so"


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

    with pytest.raises(ConfigError, match=f"--swap-space must be a number of at least 0, got {amount}"):
        config_patches.init_cache_config(fastdeploy_computes, SimpleNamespace(), ({"swap_space": amount},), {})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"write_policy": "never"}, "--write-policy must be one of auto, "),
        ({"write_through_threshold": 0}, "--write-through-threshold must be a whole number of at least 1, got 0"),
        ({"write_through_threshold": "many"}, "--write-through-threshold must be a whole number of at least 1, got 'm"),
        ({"kvcache_storage_gib": 0.0}, "--kvcache-storage-gib must be a number above 0, got 0.0"),
    ],
)
def test_a_wrong_value_is_refused_also_where_a_file_has_it(given, expected):
    """FastDeploy's `--config` takes over what it cannot convert."""
    with pytest.raises(ConfigError, match=expected):
        cache_config(**given)


@pytest.fixture
def postprocess(install, monkeypatch):
    """FastDeploy has processed its configuration; `envs` and `layout` are FAKE."""
    envs = SimpleNamespace(FD_ATTENTION_BACKEND="APPEND_ATTN")
    made = SimpleNamespace(envs=envs, layout=None, sized=[], served=[])

    def run(*, backend=None, host_blocks=0, graphs=None):
        install({"fastdeploy": {"envs": envs}})
        config, processed = fd_config(kvcache_storage_backend=backend, num_cpu_blocks=host_blocks), []
        config.graph_opt_config = graphs
        config_patches.postprocess_config(lambda: processed.append(True), config, (), {})
        assert (processed, made.served[-1:]) == ([True], [config])
        assert made.sized[-1:] == [(config, envs.FD_ATTENTION_BACKEND)]

    monkeypatch.setattr(config_patches, "require_served", made.served.append)
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


@pytest.mark.parametrize(
    ("sizes", "given", "asked"),
    [
        ((9, None), None, ["worker"]),
        ((9, None), ["worker", "cache_transfer"], ["worker"]),
        ((0, "file"), ["cache_transfer"], []),
        ((0, "file"), {"worker"}, ["worker"]),
        ((0, None), ["cache_transfer"], ["cache_transfer"]),
        ((0, None), None, None),
    ],
)
def test_no_transfer_process_is_waited_for_where_fastdeploy_has_one(monkeypatch, sizes, given, asked):
    async def wrapped(request_id, timeout, executors=None):
        return request_id, timeout, executors

    cache = fd_config(num_cpu_blocks=sizes[0], kvcache_storage_backend=sizes[1]).cache_config
    monkeypatch.setattr(engine_patches, "EnginePrefixCache", SimpleNamespace)
    manager = SimpleNamespace(cache_manager=SimpleNamespace())
    engine = SimpleNamespace(cfg=SimpleNamespace(cache_config=cache), resource_manager=manager)
    waiting = engine_patches.wait_for_control_responses(wrapped, engine, ("id", 60), {"executors": given})
    assert asyncio.run(waiting) == ("id", 60, asked)


def test_requests_pass_through_pause():
    def _control_pause(request):
        return request

    request = object()
    assert engine_patches.control_with_request(_control_pause, None, (request,), {}) is request
    assert engine_patches.control_with_request(_control_pause, None, (), {"control_request": request}) is request
