"""Patch functions of engine and configuration against FAKE host objects."""

import argparse
import asyncio
from dataclasses import asdict, dataclass, fields
from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1.config import WritePolicy
from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.fastdeploy_host import config_patches, engine_patches, settings


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in (settings.POLICY_VARIABLE, settings.THRESHOLD_VARIABLE, settings.BLOCK_BYTES_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def make_engine_args():
    @dataclass
    class EngineArgs:
        model: str = "m"
        write_policy: str = "write_through"

    config_patches.add_arguments(EngineArgs)
    return EngineArgs


def test_engine_args_get_a_field():
    engine_args = make_engine_args()
    assert [field.name for field in fields(engine_args)] == ["model", "write_policy", "write_through_threshold"]
    assert asdict(engine_args("x")) == {
        "model": "x",
        "write_policy": "write_through_selective",
        "write_through_threshold": 2,
    }
    made = engine_args(write_policy="write_back", write_through_threshold=5)
    assert (made.write_policy, made.write_through_threshold) == ("write_back", 5)


def test_command_line():
    parser = argparse.ArgumentParser()
    parser.add_argument("--write-policy", choices=["write_through"], default="write_through")
    config_patches.add_cli_arguments(lambda given: given, None, (parser,), {})
    assert vars(parser.parse_args([])) == {"write_policy": "write_through_selective", "write_through_threshold": 2}
    chosen = parser.parse_args(["--write-policy", "write_back", "--write-through-threshold", "7"])
    assert vars(chosen) == {"write_policy": "write_back", "write_through_threshold": 7}


def cache_config(**given):
    """Made as the host makes its own: arguments become attributes."""
    config = SimpleNamespace(write_policy=None, write_through_threshold=None, swap_space=None)
    config_patches.init_cache_config(vars(config).update, config, (given,), {})
    return config


def test_workers_read_the_settings_from_the_environment(monkeypatch):
    assert cache_config().write_policy == "write_through_selective"
    assert settings.host_block_bytes() is None
    environment = {}
    settings.export(WritePolicy.WRITE_BACK, 3, 4096, environment)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    config = cache_config()
    assert (config.write_policy, config.write_through_threshold) == ("write_back", 3)
    assert settings.write_policy("write_through") is WritePolicy.WRITE_THROUGH
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


@pytest.mark.parametrize("threshold", [0, -1, "many"])
def test_thresholds_that_cannot_work(threshold):
    with pytest.raises(ConfigError, match="--write-through-threshold must be a whole number of at least 1"):
        settings.write_through_threshold(threshold)


def fd_config(*, role="mixed", storage=None, host_blocks=0, swap=False, quant=None, routing=False, method=None):
    return SimpleNamespace(
        cache_config=SimpleNamespace(
            num_cpu_blocks=host_blocks, kvcache_storage_backend=storage, sized_by_swap_space=swap
        ),
        speculative_config=SimpleNamespace(method=method),
        scheduler_config=SimpleNamespace(splitwise_role=role),
        quant_config=None,
        model_config=SimpleNamespace(quantization={"kv_cache_quant_type": quant} if quant else None),
        routing_replay_config=SimpleNamespace(enable_routing_replay=routing),
    )


FACTS = {"release": "2.6", "v1_scheduler": True, "attention_backend": "APPEND_ATTN", "foreign_platform": None}


@pytest.mark.parametrize(
    ("config", "facts", "reason"),
    [
        ({"role": "prefill"}, {}, "--splitwise-role prefill"),
        ({"role": "decode"}, {}, "--splitwise-role decode"),
        ({"storage": "mooncake"}, {}, "--kvcache-storage-backend mooncake"),
        ({}, {"v1_scheduler": False}, "V0 scheduler"),
        ({}, {"foreign_platform": "xpu"}, "xpu platform"),
        ({"quant": "block_wise_fp8"}, {"attention_backend": "MLA_ATTN"}, "MLA attention with block_wise_fp8"),
        ({"quant": "block_wise_fp8"}, {"attention_backend": "FLASH_ATTN", "release": "2.5"}, "FLASH_ATTN with block"),
        ({"routing": True, "host_blocks": 4}, {}, "routing replay with --swap-space"),
        ({"routing": True, "swap": True}, {}, "routing replay with --swap-space"),
        ({"method": "mtp"}, {"attention_backend": "DSA_ATTN"}, "speculative method mtp with DSA_ATTN"),
    ],
)
def test_what_is_refused(config, facts, reason):
    (refused,) = config_patches.refusals(fd_config(**config), **{**FACTS, **facts})
    assert reason in refused


@pytest.mark.parametrize(
    ("config", "facts"),
    [
        ({"host_blocks": 9}, {}),
        ({"quant": "block_wise_fp8"}, {"attention_backend": "FLASH_ATTN"}),
        ({"quant": "block_wise_fp8"}, {"release": "2.5"}),
        ({"quant": "int8"}, {"attention_backend": "MLA_ATTN"}),
        ({"routing": True}, {}),
        ({"method": "mtp"}, {"attention_backend": "MLA_ATTN"}),
        ({"method": "ngram", "swap": True}, {"attention_backend": "DSA_ATTN"}),
        ({}, {"attention_backend": "DSA_ATTN"}),
    ],
)
def test_what_is_served(config, facts):
    assert config_patches.refusals(fd_config(**config), **{**FACTS, **facts}) == []


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


@pytest.mark.parametrize(
    ("load_config", "watched"),
    [
        (None, False),
        (SimpleNamespace(dynamic_load_weight=False), False),
        (SimpleNamespace(dynamic_load_weight=True), True),
    ],
)
def test_weight_updates_are_watched_for_only_where_they_can_happen(load_config, watched):
    assert engine_patches.loads_weights_dynamically(load_config) is watched
