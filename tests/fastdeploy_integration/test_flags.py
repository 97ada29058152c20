"""Flags of FastDeploy's server that change nothing beside its others."""

import pytest

from fastdeploy_kvcache_v1.fastdeploy_integration.settings import ADDED_FLAGS, without_effect

from .fd_configs import fd_config

DEFAULTS = {"write_policy": "auto"} | {flag.name: flag.default for flag in ADDED_FLAGS}
OFF, NO_HOST = {"enable_prefix_caching": False}, {"num_cpu_blocks": 0}
BACK, SELECTIVE = ({"write_policy": each} for each in ("write_back", "write_through_selective"))
FILE = {"kvcache_storage_backend": "file", "write_policy": "write_through"}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, []),
        (NO_HOST | OFF, []),
        (dict.fromkeys(["eviction_policy", "kvcache_storage_gib", "storage_prefetch"]) | OFF, []),
        (BACK | {"write_through_threshold": 3}, ["--write-through-threshold 3"]),
        (SELECTIVE | {"write_through_threshold": 3}, []),
        (SELECTIVE | NO_HOST | {"write_through_threshold": 3}, ["--write-through-threshold 3 or --write-policy write"]),
        (BACK | NO_HOST, ["--write-policy write_back"]),
        (OFF | {"swap_space": 2.0, "eviction_policy": "lru"}, ["--swap-space", "--eviction-policy lru"]),
        (FILE | {"kvcache_storage_dir": "/kv", "kvcache_storage_gib": 3.0, "storage_prefetch": "best_effort"}, []),
        ({"kvcache_storage_dir": "/kv", "kvcache_storage_gib": 3.0}, ["--kvcache-storage-dir", "--kvcache-storage-g"]),
        ({"storage_prefetch": "best_effort"}, ["--storage-prefetch best_effort"]),
    ],
)
def test_a_flag_without_effect_is_named_with_the_reason(given, named):
    lines = without_effect(fd_config(**DEFAULTS | given).cache_config)
    assert len(lines) == len(named)
    for line, flag in zip(lines, named, strict=True):
        assert line.startswith(flag)
        assert " has no effect: " in line
