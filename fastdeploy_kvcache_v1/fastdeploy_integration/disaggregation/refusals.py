"""What prefill and decode roles cannot be combined with."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..settings import RUN_DIRECTORY
from .settings import CUDA_IPC, PLANE

THROUGH_HOST = ("file", "mooncake")
"""Storage backends that a prefill server can have."""


def role_refusals(config: Any, environment: Mapping[str, str] = os.environ) -> dict[str, bool]:
    """Of an `FDConfig` with a role other than mixed: each reason, and whether it applies."""
    cache, parallel, scheduler = config.cache_config, config.parallel_config, config.scheduler_config
    role = f"--splitwise-role {scheduler.splitwise_role}"
    load, router = config.load_config, config.router_config  # a worker knows of no router
    return {
        f"{role} on a GPU (no data plane has read the memory of one yet; serve --fastdeploy-cpu has it)": (
            RUN_DIRECTORY not in environment
        ),
        f"{role} with {PLANE}={CUDA_IPC} ({CUDA_IPC} needs a GPU: choose socket or mooncake)": (
            RUN_DIRECTORY in environment and environment.get(PLANE) == CUDA_IPC
        ),
        f"{role} with --scheduler-name {scheduler.name} (only local, with FastDeploy's router)": (
            scheduler.name != "local" or (router is not None and not router.router)
        ),
        f"{role} with --kvcache-storage-backend {cache.kvcache_storage_backend}": (
            bool(cache.kvcache_storage_backend)
            and (scheduler.splitwise_role == "decode" or cache.kvcache_storage_backend not in THROUGH_HOST)
        ),
        f"{role} with data parallelism": int(parallel.data_parallel_size) > 1,
        f"{role} with speculative decoding": config.speculative_config.method is not None,
        f"{role} with --dynamic-load-weight": load is not None and bool(load.dynamic_load_weight),
        f"{role} with FD_ENABLE_INTERNAL_ADAPTER=1": environment.get("FD_ENABLE_INTERNAL_ADAPTER", "0") == "1",
        f"{role} with FD_ENABLE_CACHE_TASK=1": environment.get("FD_ENABLE_CACHE_TASK", "0") == "1",
    }
