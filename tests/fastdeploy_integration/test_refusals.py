"""What FastDeploy's server refuses to start with: each row of the table for its own reason, and nothing else."""

from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.fastdeploy_integration import refusals
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.settings import PLANE
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay.table import Capabilities, known_releases, table_for
from fastdeploy_kvcache_v1.fastdeploy_integration.refusals import FOREIGN, OF_ROLES, REFUSALS, Facts
from fastdeploy_kvcache_v1.fastdeploy_integration.settings import RUN_DIRECTORY

from .fd_configs import fd_config

NEWEST = table_for(known_releases()[-1])
USUAL = {
    "fastdeploy": replace(NEWEST, capabilities=Capabilities(flash_block_wise_fp8=True)),
    "v1_scheduler": True, "sees_gpu": True, "attention": "APPEND_ATTN", "whole_prompts": True, "platform": None,
    "pd_via_storage": False, "environment": {RUN_DIRECTORY: "/a/run"},
}  # fmt: skip

FILE, ATTENTION = ({"kvcache_storage_backend": each} for each in ("file", "attention_store"))
INT8, FP8 = ({"quantization": {"kv_cache_quant_type": each}} for each in ("int8", "block_wise_fp8"))
MTP, NGRAM = ({"method": each} for each in ("mtp", "ngram"))
MLA, DSA, FLASH, PLAS, NATIVE = ({"attention": f"{each}_ATTN"} for each in ("MLA", "DSA", "FLASH", "PLAS", "NATIVE"))
NO_FP8 = {"fastdeploy": replace(NEWEST, capabilities=Capabilities())}
SWAP, HOST, UNCACHED = {"sized_by_swap_space": True}, {"num_cpu_blocks": 1}, {"enable_prefix_caching": False}
GRAPHS, ROUTING, CHUNKS = {"graph_opt_level": 1}, {"enable_routing_replay": True}, {"whole_prompts": False}
PREFILL, DECODE = ({"splitwise_role": each} for each in ("prefill", "decode"))

REFUSED = {
    "--kvcache-storage-backend {0.store} without --swap-space": [FILE],
    "--kvcache-storage-backend {0.store} with tensor parallelism over several machines": [
        FILE | SWAP | {"tensor_parallel_size": 16}
    ],
    "FD_PD_TRANSFER_VIA_STORAGE=1": [FILE | SWAP | {"pd_via_storage": True}],
    "no CUDA GPU is seen": [{"v1_scheduler": False, "sees_gpu": False}],
    "ENABLE_V1_KVCACHE_SCHEDULER=0": [{"v1_scheduler": False}],
    "the {0.platform} platform": [{"platform": "xpu"}, {"v1_scheduler": False, "sees_gpu": False, "platform": "dcu"}],
    "PLAS_ATTN": [PLAS],
    "NATIVE_ATTN": [NATIVE],
    "DSA_ATTN with prefix caching or prompts in chunks": [DSA, DSA | UNCACHED | CHUNKS],
    "MLA_ATTN with block_wise_fp8": [MLA | FP8],
    "MLA_ATTN with graph_opt_level {0.graph_level}": [MLA | GRAPHS],
    "speculative method mtp with MLA_ATTN or DSA_ATTN": [MLA | MTP, DSA | MTP | UNCACHED],
    "block_wise_fp8 without APPEND_ATTN in FastDeploy {0.fastdeploy.release}": [FP8 | FLASH | NO_FP8],
    "routing replay with --swap-space": [ROUTING | HOST, ROUTING | SWAP],
    "on a GPU": [DECODE | {"environment": {}}],
    "with FASTDEPLOY_KVCACHE_TRANSFER_PLANE=cuda_ipc": [
        DECODE | {"environment": {RUN_DIRECTORY: "/d", PLANE: "cuda_ipc"}}
    ],
    "with --scheduler-name {0.config.scheduler_config.name}": [DECODE | {"name": "splitwise", "router": None}],
    "without --router": [DECODE | {"router": None}],
    "with --kvcache-storage-backend {0.store}": [DECODE | ATTENTION, PREFILL | ATTENTION],
    "with data parallelism": [DECODE | {"data_parallel_size": 2}],
    "with speculative decoding": [DECODE | MTP],
    "with --dynamic-load-weight": [DECODE | {"dynamic_load_weight": True}],
    **{
        f"with {variable}=1": [PREFILL | {"environment": {RUN_DIRECTORY: "/d", variable: "1"}}]
        for variable in ("FD_ENABLE_INTERNAL_ADAPTER", "FD_ENABLE_CACHE_TASK")
    },
}
"""By the setting of a row: what it alone refuses."""

SERVED = [
    {},
    CHUNKS,
    GRAPHS,
    ROUTING,
    FILE | HOST,
    FILE | SWAP | {"tensor_parallel_size": 8},
    ATTENTION | HOST | MTP,
    FP8 | FLASH,
    FP8 | NO_FP8,
    INT8 | MLA,
    HOST | NGRAM | MLA | CHUNKS,
    {"graph_opt_config": None} | MLA,
    {"routing_replay_config": None} | SWAP,
    NGRAM | SWAP | UNCACHED | DSA,
    *({"fastdeploy": table_for(release)} for release in known_releases()),
    {"data_parallel_size": 2, "method": "mtp", "dynamic_load_weight": True, "router": None, "environment": {}},
    DECODE,
    DECODE | {"router_config": None},  # a worker knows of no router
    DECODE | {"tensor_parallel_size": 2},
    DECODE | HOST | SWAP,
    *(PREFILL | SWAP | {"kvcache_storage_backend": each} for each in (None, "file", "mooncake")),
]


def facts(given):
    config = {name: value for name, value in given.items() if name not in USUAL}
    seen = {name: value for name, value in given.items() if name in USUAL}
    return Facts(config=fd_config(**{"num_cpu_blocks": 0} | config), **USUAL | seen)


@pytest.mark.parametrize("row", [*REFUSALS, *OF_ROLES], ids=lambda row: row.setting)
def test_each_row_alone_refuses_its_setting_and_says_why_and_what_to_do(row):
    for given in REFUSED[row.setting]:
        seen = facts(given)
        setting = row.setting.format(seen)
        if row in OF_ROLES:
            setting = f"--splitwise-role {given['splitwise_role']} {setting}"
        assert refusals.refused(seen) == [f"{setting} ({row.reason}): {row.instead}"]


@pytest.mark.parametrize("given", SERVED)
def test_other_configurations_are_served(given):
    assert refusals.refused(facts(given)) == []


@pytest.fixture
def process(install, monkeypatch):
    """A FAKE process of FastDeploy, by its variables and its platform."""
    envs = SimpleNamespace(
        ENABLE_V1_KVCACHE_SCHEDULER=1, FD_ATTENTION_BACKEND="APPEND_ATTN", FD_DISABLE_CHUNKED_PREFILL=False
    )
    made = SimpleNamespace(envs=envs, platform=None)
    monkeypatch.setattr(refusals.overlay, "active", lambda: SimpleNamespace(table=NEWEST))
    monkeypatch.delenv(RUN_DIRECTORY, raising=False)

    def facts_of(config):
        install({"fastdeploy": {"envs": envs}, "fastdeploy.platforms": {"current_platform": made.platform}})
        return Facts.of(config)

    made.facts = facts_of
    return made


def test_a_configuration_is_refused_with_every_reason(process):
    process.envs.FD_ATTENTION_BACKEND = "PLAS_ATTN"
    process.facts(None)
    lines = r"no CUDA GPU is seen \(.*\): install .*; PLAS_ATTN \(.*\): choose .*\. Change it, or unset"
    process.envs.ENABLE_V1_KVCACHE_SCHEDULER = 0
    with pytest.raises(ConfigError, match=f"ENABLE_V1_KVCACHE_MANAGER=1 cannot serve this: {lines}"):
        refusals.require_served(fd_config())


@pytest.mark.parametrize(
    ("envs", "platform", "expected"),
    [
        ({}, None, {}),
        ({"ENABLE_V1_KVCACHE_SCHEDULER": "0"}, None, {"v1_scheduler": False}),
        ({"FD_ATTENTION_BACKEND": "MLA_ATTN"}, None, {"attention": "MLA_ATTN"}),
        ({"FD_DISABLE_CHUNKED_PREFILL": True}, None, {"whole_prompts": True}),
        ({"FD_DISABLE_CHUNKED_PREFILL": True, "FD_DETERMINISTIC_MODE": True}, None, {}),
        ({"FD_PD_TRANSFER_VIA_STORAGE": 1}, None, {"pd_via_storage": True}),
        *(({}, f"is_{name}", {"platform": name}) for name in FOREIGN),
        ({}, "is_cuda", {"sees_gpu": True}),
        ({"CPU worker": True}, None, {"sees_gpu": True}),
    ],
)
def test_the_facts_are_those_of_the_process(process, monkeypatch, envs, platform, expected):
    vars(process.envs).update(envs)
    if "CPU worker" in envs:
        monkeypatch.setenv(RUN_DIRECTORY, "/a/run")
    process.platform = platform and SimpleNamespace(**{"is_xpu": lambda: False, platform: lambda: True})
    usual = {**USUAL, "fastdeploy": NEWEST, "sees_gpu": False, "whole_prompts": False}
    found = process.facts(None)
    assert {name: getattr(found, name) for name in USUAL if name != "environment"} == {
        name: value for name, value in {**usual, **expected}.items() if name != "environment"
    }
