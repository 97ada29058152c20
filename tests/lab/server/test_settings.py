"""Flags to settings: defaults, and one clear line for everything that cannot work."""

import argparse

import pytest

from fastdeploy_kvcache_v1.config import GIB
from fastdeploy_kvcache_v1.contract.flags import add_flags
from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.lab.model.config import ChecksumConfig, load_model_config
from fastdeploy_kvcache_v1.lab.model.reproducible import default_threads
from fastdeploy_kvcache_v1.lab.server.settings import FLAGS, server_config

BLOCK_BYTES = 4 * 2 * 4 * 64 * 16 * 4  # layers, key and value, heads, tokens, head dim, float32
STORAGE = ("--kvcache-storage-backend", "file", "--kvcache-storage-dir", "kv")
ATTENTION_STORE = ("--kvcache-storage-backend", "attention_store")


def configure(*flags, free_bytes=8 * GIB, model=None):
    parser = argparse.ArgumentParser()
    add_flags(parser, FLAGS)
    args = parser.parse_args(flags)
    model = model or load_model_config(None, args.model_family, mtp=bool(args.mtp))
    return server_config(args, model, free_bytes=free_bytes)


def test_defaults():
    config = configure()
    assert config.is_random_model
    assert config.served_model_name == "random-tiny"
    assert config.max_model_len == ChecksumConfig().max_position
    assert config.cache.block_size == 64
    assert config.cache.enable_prefix_caching
    assert config.cache.write_policy.value == "auto"
    assert config.cache.num_host_blocks == GIB // BLOCK_BYTES
    assert config.cache.num_device_blocks == GIB // 2 // BLOCK_BYTES
    assert config.threads == default_threads()


def test_storage_is_a_directory_for_ten_gib_that_requests_wait_for_a_while():
    assert configure().storage is None
    storage = configure(*STORAGE).storage
    assert storage.prefetch.value == "timeout"
    assert storage.options == {
        "kvcache_storage_dir": "kv", "kvcache_storage_gib": 10.0, "kvcache_storage_write_gib_per_day": None
    }  # fmt: skip


def test_mooncake_storage_shares_the_host_tier_and_takes_no_directory():
    storage = configure("--kvcache-storage-backend", "mooncake").storage
    assert (storage.backend, storage.options) == ("mooncake", {})
    with pytest.raises(ConfigError, match="--kvcache-storage-dir needs --kvcache-storage-backend file"):
        configure("--kvcache-storage-backend", "mooncake", "--kvcache-storage-dir", "kv")


def test_ranks_of_a_latent_cache_have_whole_blocks_each():
    two, latent = ("--tensor-parallel-size", "2"), {"model": ChecksumConfig("mla")}
    assert configure(*two).cache.num_host_blocks == configure().cache.num_host_blocks, "each rank has half of a block"
    alone, both = configure(**latent).cache, configure(*two, **latent).cache
    assert both.num_host_blocks == alone.num_host_blocks // 2
    assert both.num_device_blocks == alone.num_device_blocks // 2


def test_the_attention_store_needs_no_host_tier():
    config = configure(*ATTENTION_STORE, "--swap-space", "0")
    assert config.storage.uses_device_tier
    assert config.cache.num_host_blocks == 0
    assert config.cache.max_queued_events == 0


def test_only_to_flush_its_index_is_fastdeploys_variable(monkeypatch):
    monkeypatch.setenv("FD_AS_ONLY_FLUSH", "1")
    config = configure(*ATTENTION_STORE)
    assert config.storage.flush_only
    assert config.cache.max_queued_events > 0, "its index follows cache events"
    assert not configure(*STORAGE).storage.flush_only
    monkeypatch.setenv("FD_AS_ONLY_FLUSH", "yes")
    with pytest.raises(ConfigError, match="FD_AS_ONLY_FLUSH must be one of 0, 1, got 'yes'"):
        configure(*ATTENTION_STORE)


def test_defaults_shrink_with_the_free_memory():
    config = configure(free_bytes=GIB)
    assert config.cache.num_device_blocks == config.cache.num_host_blocks == GIB // 4 // BLOCK_BYTES


def test_sizes():
    config = configure("--swap-space", "0.5", "--num-gpu-blocks-override", "7", "--max-model-len", "100")
    assert config.cache.num_host_blocks == GIB // 2 // BLOCK_BYTES
    assert config.cache.num_device_blocks == 7
    assert config.max_model_len == 100
    assert configure("--threads", "3").threads == 3


def test_cache_dtype_decides_the_block_size():
    config = configure("--swap-space", "1", "--cache-dtype", "bfloat16")
    assert config.cache.num_host_blocks == 2 * GIB // BLOCK_BYTES


def test_without_prefix_caching_the_host_tier_is_useless():
    config = configure("--no-enable-prefix-caching", "--swap-space", "1")
    assert not config.cache.enable_prefix_caching
    assert config.cache.num_host_blocks == 0


def test_model_name_comes_from_the_directory(tmp_path):
    assert configure("--model", str(tmp_path / "my-model")).served_model_name == "my-model"
    assert configure("--served-model-name", "x").served_model_name == "x"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--write-policy", "never"], "--write-policy must be one of auto, "),
        (["--swap-space", "9"], "--swap-space 9 GiB is more than the 7.50 GiB of memory that is free"),
        (["--num-gpu-blocks-override", "1000000"], "only 8.00 GiB of memory is free"),
        (["--max-model-len", "40000"], "--max-model-len must be at most 32768 for this model, got 40000"),
        (
            ["--kvcache-storage-backend", "file"],
            "--kvcache-storage-backend file needs --kvcache-storage-dir (directory",
        ),
        (["--kvcache-storage-dir", "kv"], "--kvcache-storage-dir needs --kvcache-storage-backend file"),
        (
            [*ATTENTION_STORE, "--kvcache-storage-dir", "kv"],
            "--kvcache-storage-dir needs --kvcache-storage-backend file",
        ),
        (["--kvcache-storage-gib", "5"], "--kvcache-storage-gib needs --kvcache-storage-backend file"),
        ([*ATTENTION_STORE, "--no-enable-prefix-caching"], "--kvcache-storage-backend needs the cache"),
        ([*STORAGE, "--swap-space", "0"], "--kvcache-storage-backend needs a host tier"),
        ([*STORAGE, "--no-enable-prefix-caching"], "--kvcache-storage-backend needs a host tier"),
    ],
)
def test_impossible_values_are_one_clear_line(flags, message):
    with pytest.raises(ConfigError, match=r"^.*$") as caught:
        configure(*flags)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (ATTENTION_STORE, "--role excludes --kvcache-storage-backend attention_store"),
        (["--no-enable-prefix-caching"], "--role needs the cache"),
        (
            ["--transfer-address", "127.0.0.1:65535", "--tensor-parallel-size", "2"],
            "--transfer-address needs a port per rank behind 65535",
        ),
    ],
)
def test_what_does_not_go_with_a_role_is_one_clear_line(tmp_path, flags, message):
    secret = tmp_path / "secret"
    secret.write_text("sixteen bytes or more")
    secret.chmod(0o600)
    with pytest.raises(ConfigError, match=message):
        configure("--role", "decode", "--peer-secret-file", str(secret), *flags)
