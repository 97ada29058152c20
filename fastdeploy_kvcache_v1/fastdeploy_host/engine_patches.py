"""Patches of the engine: which cache manager it uses, how swaps travel, and what it no longer waits for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from ..config import KVCacheConfig
from . import overlay, settings, swap_space
from .adapter import PrefixCacheAdapter
from .metrics import CacheMetricsPublisher
from .status_signals import StatusAnswers
from .table import Where

Wrapped = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class NoSignal:
    """Stands for a shared-memory signal that nobody waits for."""

    def clear(self) -> None:
        """The host clears it at its end."""


class HostedPrefixCache(PrefixCacheAdapter):
    """The adapter inside a real host: takes its settings from `FDConfig`, feeds the host's metrics."""

    shm_cache_task_flag_broadcast = NoSignal()
    cache_ready_signal = NoSignal()

    def __init__(self, config: Any) -> None:
        swap_space.require_host_memory(config)
        from fastdeploy.metrics.metrics import main_process_metrics

        cache = config.cache_config
        policy = settings.write_policy(cache.write_policy)
        threshold = settings.write_through_threshold(cache.write_through_threshold)
        settings.export(policy, threshold, cache.host_block_bytes)
        super().__init__(
            KVCacheConfig(
                num_device_blocks=int(cache.total_block_num),
                num_host_blocks=int(cache.num_cpu_blocks),
                block_size=int(cache.block_size),
                write_policy=policy,
                write_through_threshold=threshold,
                enable_prefix_caching=bool(cache.enable_prefix_caching),
                max_queued_events=0,
            ),
            gauges=main_process_metrics,
            whole_items=bool(cache.disable_chunked_mm_input),
        )
        self.publisher = CacheMetricsPublisher(self)
        self._answers: StatusAnswers | None = None
        if cache.host_block_bytes is not None:
            _log_host_tier(cache, config.parallel_config.tensor_parallel_size)

    def launch_cache_manager(
        self,
        cache_config: Any,
        tensor_parallel_size: int,
        device_ids: Any,
        pod_ip: str,
        engine_worker_queue_port: int,
        ipc_suffix: Any,
        create_cache_tensor: bool,
    ) -> list[Any]:
        """Starts no process: workers copy blocks themselves. Returns the empty list of processes."""
        from fastdeploy import envs

        if cache_config.enable_prefix_caching and not envs.FD_ENABLE_V1_UPDATE_WEIGHTS and self._answers is None:
            cache_status = _open_signal("kv_cache_status", engine_worker_queue_port) if self.num_cpu_blocks else None
            self._answers = StatusAnswers(
                self, _open_signal("prefix_tree_status", engine_worker_queue_port), cache_status
            )
            self._answers.start()
        return []


def _log_host_tier(cache: Any, num_ranks: int) -> None:
    from fastdeploy.utils import llm_logger  # where operators look; the host shows nothing of other loggers

    llm_logger.info(swap_space.describe(cache.swap_space, cache.num_cpu_blocks, cache.host_block_bytes, num_ranks))
    if not cache.enable_prefix_caching:
        llm_logger.warning("--swap-space has no effect: prefix caching is off")


def _open_signal(name: str, suffix: int) -> Any:
    """A signal that the engine has created before it launches its cache service."""
    import numpy as np
    from fastdeploy.inter_communicator import IPCSignal

    return IPCSignal(name=name, array=np.zeros([1], dtype=np.int32), dtype=np.int32, suffix=suffix, create=False)


def make_cache_manager(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces the class `PrefixCacheManager` where the resource manager makes one."""

    def prefix_cache_manager(
        config: Any, tensor_parallel_size: int, splitwise_role: str = "mixed", local_data_parallel_id: int = 0
    ) -> HostedPrefixCache:
        overlay.active().require_complete(Where.ENGINE)
        return HostedPrefixCache(config)

    return prefix_cache_manager


def schedule(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Wraps `ResourceManagerV1.schedule`: the batch carries every copy decided since the last one."""
    tasks, errors = wrapped(*args, **kwargs)
    cache: HostedPrefixCache = instance.cache_manager
    cache.send_swaps(tasks)
    cache.publisher.publish()
    return tasks, errors


def wait_for_control_responses(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Awaitable[Any]:
    """Wraps the wait for answers to a control request: only workers answer, there is no transfer process."""

    def wait(request_id: str, timeout: int, executors: list[str] | None = None) -> Awaitable[Any]:
        answering = ["worker"] if executors is None else [each for each in executors if each != "cache_transfer"]
        answer: Awaitable[Any] = wrapped(request_id, timeout, executors=answering)
        return answer

    return wait(*args, **kwargs)


def clear_data(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Wraps `EngineService.clear_data`, which drops a batch that may carry copies."""
    try:
        return wrapped(*args, **kwargs)
    finally:
        instance.resource_manager.cache_manager.batch_dropped()


def control_with_request(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Wraps pause and resume: sleep and wakeup call them with None, and they ask it for its id."""

    def call(control_request: Any) -> Any:
        if control_request is None:
            from fastdeploy.engine.request import ControlRequest

            method = wrapped.__name__.removeprefix("_control_")
            control_request = ControlRequest(request_id=f"kvcache_v1_{method}", method=method)
        return wrapped(control_request)

    return call(*args, **kwargs)
