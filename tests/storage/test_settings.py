"""What users choose, which classes that makes, and what is checked before a server takes memory."""

from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager
from fastdeploy_kvcache_v1.storage.attention_store.tier import AttentionStoreTier
from fastdeploy_kvcache_v1.storage.backends import check_settings, make_tier
from fastdeploy_kvcache_v1.storage.engine.tier import StorageTier
from fastdeploy_kvcache_v1.storage.file.file_backend import FileBackend
from fastdeploy_kvcache_v1.storage.settings import STORAGE_FLAGS, Prefetch, StorageSettings, takes_host_blocks
from tests.storage.attention_store.memory import space
from tests.storage.engines import RecordingLink
from tests.storage.values import namespace


def of_flags(backend="file", directory="kv", gib=1.0, prefetch="timeout", **more):
    return StorageSettings.of_flags(
        SimpleNamespace(
            **{flag.name: flag.default for flag in STORAGE_FLAGS}
            | {
                "kvcache_storage_backend": backend,
                "kvcache_storage_dir": directory,
                "kvcache_storage_gib": gib,
                "storage_prefetch": prefetch,
            }
            | more
        )
    )


@pytest.mark.parametrize(
    # The store, whether its blocks go through the host tier, and whether another process maps that.
    ("backend", "on_host", "tier"),
    [
        ("file", True, StorageTier),
        ("mooncake", True, StorageTier),
        ("attention_store", False, AttentionStoreTier),
    ],
)
def test_a_store_is_of_the_host_or_of_the_device_tier(backend, on_host, tier):
    settings = of_flags(backend)
    assert settings.uses_device_tier == (not on_host)
    assert takes_host_blocks(backend) == on_host
    manager = CacheManager(KVCacheConfig(8, 8 * on_host))
    assert type(make_tier(manager, settings, None, RecordingLink(1))) is tier


@pytest.mark.parametrize(
    ("backend", "variable", "flush_only"),
    [("attention_store", "1", True), ("attention_store", "0", False), ("file", "1", False), ("mooncake", "2", False)],
)
def test_only_the_index_is_told_where_fastdeploys_variable_says_so(monkeypatch, backend, variable, flush_only):
    monkeypatch.setenv("FD_AS_ONLY_FLUSH", variable)
    assert of_flags(backend).flush_only == flush_only


def test_flags_are_taken_over():
    settings = of_flags(gib=0.5, prefetch="best_effort")
    assert settings.prefetch is Prefetch.BEST_EFFORT
    assert (settings.options["kvcache_storage_dir"], settings.options["kvcache_storage_gib"]) == ("kv", 0.5)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"prefetch": "soon"}, "--storage-prefetch must be one of best_effort, timeout, wait_complete, got 'soon'"),
        ({"backend": "disk"}, "--kvcache-storage-backend must be one of file, mooncake, attention_store, got 'disk'"),
        ({"directory": None}, "--kvcache-storage-backend file needs --kvcache-storage-dir"),
        ({"directory": ""}, "--kvcache-storage-backend file needs --kvcache-storage-dir"),
        ({"gib": 0.0}, "--kvcache-storage-gib must be a number above 0, got 0.0"),
    ],
)
def test_a_flag_that_cannot_work_is_named(change, line):
    with pytest.raises(ConfigError, match=line):
        of_flags(**change)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"flush_only": True}, "the storage backend mooncake has no index to flush: choose one that has"),
        ({"timeout_base_s": -1}, "timeout_base_s must be a number of seconds from 0 on, got -1"),
        ({"timeout_per_1k_tokens_s": 1e6}, "timeout_per_1k_tokens_s must be"),
        ({"stall_s": float("nan")}, "stall_s must be"),
        ({"min_tokens": 0}, "min_tokens must be at least 1, got 0"),
    ],
)
def test_a_setting_that_cannot_work_is_named(change, line):
    with pytest.raises(ConfigError, match=line):
        StorageSettings("mooncake", **change)


def test_the_least_that_can_work():
    StorageSettings("mooncake", timeout_base_s=0, timeout_per_1k_tokens_s=0, stall_s=0, min_tokens=1)


def test_a_variable_that_is_no_switch_is_named(monkeypatch):
    monkeypatch.setenv("FD_AS_ONLY_FLUSH", "yes")
    with pytest.raises(ConfigError, match="FD_AS_ONLY_FLUSH must be one of 0, 1, got 'yes'"):
        of_flags("attention_store")


def test_a_directory_is_checked_before_a_server_takes_memory(tmp_path):
    settings = of_flags(directory=str(tmp_path / "kv"), kvcache_storage_write_gib_per_day=0.5)
    check_settings(settings)
    backend = settings.kind.open(settings, namespace())
    assert isinstance(backend, FileBackend)
    assert (backend.capacity_bytes, backend.write_bytes_per_day) == (1 << 30, 1 << 29)
    backend.close()
    (tmp_path / "kv" / "format").write_text("another")
    with pytest.raises(ConfigError, match="another version"):
        check_settings(settings)


def test_the_attention_store_is_checked_before_a_server_takes_memory(sdk_store, monkeypatch):
    settings = of_flags("attention_store")
    check_settings(settings)
    check_settings(settings, space())
    with pytest.raises(ConfigError, match="moves blocks of a key and a value"):
        check_settings(settings, namespace())
    check_settings(StorageSettings("attention_store", flush_only=True), namespace())
    monkeypatch.undo()
    for check in (lambda: check_settings(settings), lambda: check_settings(settings, space())):
        with pytest.raises(ConfigError, match="needs the package attentionstore_sdk"):
            check()
