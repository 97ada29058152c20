"""Patches of the engine: which cache manager it uses, how swaps travel, and what it no longer waits for."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import islice
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, TypeVar

from ... import __version__
from ...config import KVCacheConfig, WritePolicy
from ...contract.messages import CacheLevel, WorkerReport
from ...contract.tool_calls import tool_call_ends
from ...errors import ConfigError, KVCacheError, StorageError
from ...link.engine import EngineLink
from ...link.reports import Reports
from ...storage.backends import check_settings, make_tier, open_store
from ...storage.settings import StorageSettings
from ...telemetry.trace_recorder import VARIABLE as RECORD_VARIABLE
from ...telemetry.trace_recorder import TraceRecorder
from .. import Args, Kwargs, Wrapped, settings, swap_space
from ..link import engine_link
from ..overlay import overlay
from .adapter import PrefixCacheAdapter
from .followers import Followers
from .lost_batches import Batch, Transit
from .metrics import CacheMetricsPublisher
from .prompt_inputs import PromptInputs, inputs_of
from .rank_passes import RankPasses
from .running_rows import running_rows
from .same_id import HeldBack
from .storage import EngineStorage
from .storage_namespace import has_weights_of_directory, settings_digest, storage_namespace
from .traced_requests import TracedRequests
from .weight_updates import WeightUpdates, start_again

CUT = "_kvcache_v1_cut"
"""Of a request whose videos FastDeploy has cut: a `PromptInputs`, which no client can name."""


class NoSignal:
    """Stands for a shared-memory signal that no process waits for."""

    def clear(self) -> None:
        """FastDeploy clears it at its end."""


class EnginePrefixCache(PrefixCacheAdapter):
    """The adapter inside a real FastDeploy: takes its settings from `FDConfig`, feeds FastDeploy's metrics."""

    shm_cache_task_flag_broadcast = NoSignal()
    cache_ready_signal = NoSignal()
    needs_link = False
    """True: without a link to the workers there is no start."""

    def __init__(self, config: Any) -> None:
        swap_space.require_host_memory(config)
        self._config = config
        from fastdeploy import envs
        from fastdeploy.metrics.metrics import main_process_metrics

        cache = config.cache_config
        self._storage_settings = settings.storage_settings(cache)
        settings.export(cache.host_block_bytes, self._storage_settings)
        follows_events = self._storage_settings is not None and self._storage_settings.flush_only
        if self._storage_settings is not None:
            _check_storage(self._storage_settings)
        super().__init__(
            KVCacheConfig.of_flags(
                cache,
                num_device_blocks=int(cache.total_block_num),
                num_host_blocks=int(cache.num_cpu_blocks),
                block_size=int(cache.block_size),
                block_bytes=swap_space.block_bytes(config, envs.FD_ATTENTION_BACKEND),
                enable_prefix_caching=bool(cache.enable_prefix_caching),
                max_queued_events=KVCacheConfig.max_queued_events if follows_events else 0,
            ),
            gauges=main_process_metrics,
            whole_items=bool(cache.disable_chunked_mm_input),
        )
        self.tool_call_ends = tool_call_ends(Path(config.model_config.model))
        self.publisher = CacheMetricsPublisher(self, overlay.active())
        if trace := os.environ.get(RECORD_VARIABLE):
            self._record_trace(Path(trace))
        self.transit = Transit(self)
        self.followers = Followers(self)
        self.held_back = HeldBack(lambda request_id: self.storage is not None and self.storage.holds(request_id))
        self.arrivals = threading.Lock()
        """One request at a time is looked for, and put, where it waits: of two with one id the second sees the first.
        Before FastDeploy's lock and the adapter's.
        """
        self.link: EngineLink | None = None
        """To the workers, once the cache service is launched; None where nothing is copied."""
        self.handlers: dict[type, Callable[[int, Any], None]] = {}
        """Of what the link delivers, on its thread."""
        self._store_lost_rank: Callable[[int], None] = lambda rank: None
        self.reports: Reports | None = None
        """Of the workers, where there is a link."""
        self.updates: WeightUpdates | None = None
        """Of the legacy API, once the cache service is launched; None where they cannot happen."""
        self.epoch = 0
        """The weight update after which requests last started again. The schedule loop's own."""
        self._num_ranks_here = int(config.worker_num_per_node)
        self._may_update_weights = config.load_config is not None and bool(config.load_config.dynamic_load_weight)
        for line in settings.without_effect(cache):
            _logger().warning(line)
        if cache.host_block_bytes is not None:
            num_ranks = config.parallel_config.tensor_parallel_size
            line = swap_space.describe(cache.swap_space, cache.num_cpu_blocks, cache.host_block_bytes, num_ranks)
            _logger().info(line)
        self._has_told_start = False
        if not cache.enable_prefix_caching:  # then FastDeploy may launch no cache service
            self._tell_start()

    def _tell_start(self) -> None:
        """One line, once, when the size of the device tier is known: this package serves, and how."""
        if not self._has_told_start:
            self._has_told_start = True
            _logger().info(
                "fastdeploy-kvcache-v1 %s is the cache manager of FastDeploy %s: %s",
                __version__,
                overlay.active().table.release,
                self.describe(),
            )

    def describe(self) -> str:
        """Sizes, policies and store in one line."""
        config, cache = self.manager.config, self._config.cache_config
        if not config.enable_prefix_caching:
            return "prefix caching is off"
        policy = config.write_policy.value
        if config.write_policy is WritePolicy.WRITE_THROUGH_SELECTIVE:
            policy += f" (at hit {config.write_through_threshold})"
        return (
            f"{self.num_gpu_blocks} device blocks and {self.num_cpu_blocks} host blocks of {config.block_size} tokens, "
            f"write policy {policy}, eviction policy {config.eviction_policy}, "
            f"store {cache.kvcache_storage_backend or 'none'}"
        )

    def _record_trace(self, path: Path) -> None:
        """Raises `ConfigError` where the file cannot be made."""
        recorder = TraceRecorder(path, self.manager.config.block_size, log=_logger())
        Finalize(None, recorder.close, exitpriority=0)
        self.traced = TracedRequests(recorder)
        self.publisher.add(recorder)
        _logger().info("recording a trace of the requests in %s", recorder.path)

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

        self._tell_start()
        storage = self._storage_settings
        has_reports = self.num_cpu_blocks or (storage is not None and storage.uses_device_tier)
        has_reports = bool(cache_config.enable_prefix_caching and has_reports)
        if (self.needs_link or has_reports) and self.link is None:
            chosen = storage if has_reports else None
            self._listen_to_workers(int(engine_worker_queue_port), tensor_parallel_size, chosen)
        is_legacy = self._may_update_weights and not envs.FD_ENABLE_V1_UPDATE_WEIGHTS
        if cache_config.enable_prefix_caching and is_legacy and self.updates is None:
            port = engine_worker_queue_port
            self.updates = WeightUpdates(
                self,
                weights=_open_signal("model_weights_status", port),
                tree=_open_signal("prefix_tree_status", port),
                heartbeats=_open_signal(
                    "worker_healthy_live_signal", port, min(self._num_ranks_here, tensor_parallel_size)
                ),
                copies=_open_signal("kv_cache_status", port) if self.num_cpu_blocks else None,
            )
            self.updates.start()
        return []

    def _listen_to_workers(self, queue_port: int, num_ranks: int, chosen: StorageSettings | None) -> None:
        """Most serve without it: metrics of copies stay at 0 then, and a failed copy is found later.

        Raises `ConfigError`.
        """
        try:
            self.link = engine_link(queue_port, num_ranks, _logger())
        except ConfigError as error:
            if self.needs_link or chosen is not None:
                raise
            _logger().warning("metrics of copies stay 0: %s", error)
            return
        Finalize(None, self.link.close, exitpriority=0)  # also at the end of a forked data parallel engine
        self.reports = self.publisher.reports = Reports(num_ranks)
        self.handlers[WorkerReport] = self.reports.put
        storage = None if chosen is None else self._make_storage(self.link, chosen)
        self.link.listen(self.handlers, self._rank_gone)
        if storage is not None and chosen is not None:
            self._start_storage(storage, chosen)

    def _rank_gone(self, rank: int) -> None:
        _logger().warning("worker rank %d is gone", rank)
        self._store_lost_rank(rank)

    def _make_storage(self, ranks: EngineLink, chosen: StorageSettings) -> EngineStorage:
        from fastdeploy import envs

        num_kv_heads = partial(swap_space.num_kv_heads, self._config, envs.FD_ATTENTION_BACKEND)
        store = open_store(chosen, ranks, num_kv_heads)
        self.handlers.update(store.handlers)
        self._store_lost_rank = store.rank_gone
        link = store.link
        passes = RankPasses(ranks.num_ranks) if chosen.uses_device_tier and not chosen.flush_only else None
        digest = settings_digest(self._config, envs.environment_variables)  # now: FastDeploy goes on writing into it
        storage = EngineStorage(
            make_tier(self.manager, chosen, None, link, passes=passes),
            link,
            lock=self._lock,
            find_namespace=partial(storage_namespace, self._config, envs.FD_ATTENTION_BACKEND, digest),
            passes=passes,
            log=_logger(),
        )
        Finalize(None, storage.close, exitpriority=1)  # before the directory of its sockets goes
        self.publisher.add(storage.tier)
        return storage

    def _start_storage(self, storage: EngineStorage, chosen: StorageSettings) -> None:
        """Raises `ConfigError`."""
        if not has_weights_of_directory(self._config):
            storage.weights_changed()
        if chosen.uses_device_tier:
            try:
                storage.start_connected()
            except KVCacheError as error:
                raise ConfigError(f"the storage backend {chosen.backend} cannot be used: {error}") from None
        else:
            storage.start()
        self.use_storage(storage)

    def reset(self, wait_for_tasks_done: bool = False) -> None:
        """FastDeploy is paused and has answered every request that it knows; so have those that wait outside it."""
        self.held_back.clear()
        if self.storage is not None:
            self.storage.clear()
        super().reset(wait_for_tasks_done)
        self.publisher.publish_now()

    def release_stored(self, storage: EngineStorage, manager: Any) -> None:
        """Requests whose stored prefix is here go on, before `manager` (FastDeploy's ResourceManagerV1) schedules."""
        for request in storage.release(manager):
            try:
                if request.request_id in manager.to_be_rescheduled_request_id_set:
                    manager.reschedule_preempt_task(request.request_id)
                else:
                    manager.add_request(request)
            finally:
                storage.queued(request)

    def take_reports(self) -> None:
        """Before requests are matched: host blocks whose copy failed in a worker are no longer found, and what reached
        the host is stored.

        A copy to the device that failed is the worker's affair: the batch that needs it is on its way.
        """
        if self.reports is None or not (reports := self.reports.take()):
            return
        copies = (result for _, report in reports for result in report.transfers)
        if failed := [result for result in copies if result.target is CacheLevel.HOST]:
            self.host_copies_failed(failed)
        self.measured({rank: report.prefills for rank, report in reports})
        if self.storage is not None:
            self.storage.copies_reported(reports)


def _check_storage(chosen: StorageSettings) -> None:
    """Raises `ConfigError` where the store cannot work. One that does not work now is left for later."""
    try:
        check_settings(chosen)
    except StorageError as error:
        _logger().warning("the store does not work yet, so the server starts without stored blocks: %s", error)


def _logger() -> logging.Logger:
    from fastdeploy.utils import llm_logger  # where operators look; FastDeploy shows nothing of other loggers

    logger: logging.Logger = llm_logger
    return logger


def _open_signal(name: str, suffix: int, length: int = 1) -> Any:
    """A signal that the engine has created before it launches its cache service."""
    import numpy as np
    from fastdeploy.inter_communicator import IPCSignal

    return IPCSignal(name=name, array=np.zeros([length], dtype=np.int32), dtype=np.int32, suffix=suffix, create=False)


Cache = TypeVar("Cache", bound=PrefixCacheAdapter)


def own_cache(instance: Any, kind: type[Cache]) -> Cache | None:
    """The cache manager of FastDeploy's resource manager, or of an object that has one; None unless it is of `kind`.

    Patches leave all other objects alone: FastDeploy's tests and tools make some with another cache manager, or none.
    """
    cache = getattr(getattr(instance, "resource_manager", instance), "cache_manager", None)
    return cache if isinstance(cache, kind) else None


def schedule(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Wraps `ResourceManagerV1.schedule`: the batch carries every copy decided since the last one.

    What a lost batch left behind is put right first. While weights are updated there is no batch; before the first one
    after that, every request starts again.
    """
    if (cache := own_cache(instance, EnginePrefixCache)) is None:
        return wrapped(*args, **kwargs)
    epoch = cache.updates.enter() if cache.updates is not None else 0
    if epoch is None:
        return [], []
    if epoch != cache.epoch:
        start_again(instance)
        cache.transit.forget()
        cache.batch_dropped()
        if cache.storage is not None:
            cache.storage.weights_changed()
        cache.epoch = epoch
    cache.transit.recover(instance)
    cache.take_reports()
    if cache.storage is not None:
        cache.release_stored(cache.storage, instance)
    if cache.held_back:
        for request in cache.held_back.release(instance):
            instance.add_request(request)
    with instance.lock:  # other threads bring requests
        line = list(islice(instance.waiting, cache.manager.config.lookahead_requests))
    cache.expect(line)
    try:
        tasks, errors = wrapped(*args, **kwargs)
    except Exception as error:  # FastDeploy's own loop catches it, and goes on as if nothing had been scheduled
        cache.transit.failed(instance, error)
        raise
    finally:
        cache.followers.put_back(instance)
    tasks = cache.transit.depart(instance, tasks or cache.carrier(instance))
    cache.send_swaps(tasks, running_rows(instance) if cache.manager.config.num_host_blocks else None)
    cache.publisher.publish()
    return Batch(tasks, cache, epoch), errors


def put_tasks(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Wraps `EngineWorkerQueue.put_tasks`: a batch counts once it is in the queue, and none from before a weight update
    gets there after it.
    """

    def put(tasks: Any) -> Any:
        batch = tasks[0] if isinstance(tasks, tuple) else None
        if not isinstance(batch, Batch):
            return wrapped(tasks)
        cache: EnginePrefixCache = batch.cache

        def put_batch() -> Any:
            try:
                result = wrapped(tasks)
            except Exception:
                # FastDeploy puts a batch into an empty queue only: what is there now is this one.
                if instance.exist_tasks():
                    cache.transit.sent()
                raise
            cache.transit.sent()
            return result

        if cache.updates is None:
            return put_batch()
        return cache.updates.put(batch.epoch, instance.exist_tasks, put_batch)

    return put(*args, **kwargs)


def add_request(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> None:
    """Wraps `ResourceManagerV1.add_request`: what names a prompt is taken before FastDeploy rewrites it. A request
    waits outside while another one has its id, and for its stored prefix.
    """

    if (cache := own_cache(instance, EnginePrefixCache)) is None:
        wrapped(*args, **kwargs)
        return

    def add(request: Any) -> None:
        inputs_of(request)
        with cache.arrivals:
            is_back = cache.storage is not None and cache.storage.has_released(request)
            if is_back or not (cache.held_back.hold(instance, request) or cache.waits_for_storage(request)):
                wrapped(request)

    add(*args, **kwargs)


def reschedule_preempt_task(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> None:
    """Wraps `ResourceManagerV1.reschedule_preempt_task`: a request waits for its stored blocks before it goes to the
    front of FastDeploy's queue, where no other request could pass it.
    """
    cache = own_cache(instance, EnginePrefixCache)
    if cache is None or (storage := cache.storage) is None or not cache.preempted_wait:
        wrapped(*args, **kwargs)
        return

    def put_back(request_id: str, *others: Any) -> None:
        is_preempted = request_id in instance.to_be_rescheduled_request_id_set
        request = instance.requests.get(request_id) if is_preempted else None
        may_go = request is None or request.status.name != "PREEMPTED" or storage.has_released(request)
        if may_go or not (storage.holds(request_id) or cache.waits_for_storage(request)):
            wrapped(request_id, *others)

    put_back(*args, **kwargs)


def preempted_all(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Wraps `ResourceManagerV1.preempted_all`: FastDeploy waits then until all of them are in its queue, and may not
    schedule.
    """
    answer = wrapped(*args, **kwargs)
    cache = own_cache(instance, EnginePrefixCache)
    if cache is not None and (storage := cache.storage) is not None:
        for request in storage.drain():
            instance.reschedule_preempt_task(request.request_id)
            storage.queued(request)
    return answer


def waiting_async_process(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> bool | None:
    """Wraps the question whether a waiting request is complete: True passes over it, also while the batch computes a
    prefix of it for another one.
    """

    def process(request: Any) -> bool | None:
        is_incomplete: bool | None = wrapped(request)
        if is_incomplete is False and (cache := own_cache(instance, EnginePrefixCache)) is not None:
            return cache.followers.passes_over(instance, request)
        return is_incomplete

    return process(*args, **kwargs)


def update_mm_hashes(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> None:
    """Wraps `ResourceManagerV1._update_mm_hashes`: FastDeploy cuts the videos of a request once, and not at each match.
    The second time it takes a part for the next item, and tells the workers that item's place wrong.
    """
    if own_cache(instance, PrefixCacheAdapter) is None:
        wrapped(*args, **kwargs)
        return
    request = kwargs["request"] if "request" in kwargs else args[-1]
    if not isinstance(vars(request).get(CUT), PromptInputs):
        inputs = inputs_of(request)
        wrapped(*args, **kwargs)
        setattr(request, CUT, inputs)


def get_prefix_cached_blocks_in_turn(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> bool:
    """Wraps the match of a waiting request: see `PrefixCacheAdapter.may_match`."""

    def match(request: Any) -> bool:
        cache = own_cache(instance, PrefixCacheAdapter)
        return (cache is None or cache.may_match(request)) and wrapped(request)

    return match(*args, **kwargs)


def wait_for_control_responses(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Awaitable[Any]:
    """Wraps the wait for answers to a control request: only workers answer, not the transfer process that FastDeploy
    would have for a host tier or a store.
    """
    sizes = instance.cfg.cache_config
    would_have_one = sizes.num_cpu_blocks > 0 or sizes.kvcache_storage_backend
    if not would_have_one or own_cache(instance, EnginePrefixCache) is None:
        forwarded: Awaitable[Any] = wrapped(*args, **kwargs)
        return forwarded

    def wait(request_id: str, timeout: int, executors: list[str] | None = None) -> Awaitable[Any]:
        answering = ["worker"] if executors is None else [each for each in executors if each != "cache_transfer"]
        answer: Awaitable[Any] = wrapped(request_id, timeout, executors=answering)
        return answer

    return wait(*args, **kwargs)


def clear_data(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Wraps `EngineService.clear_data`, which ends every request and drops a batch that may carry copies."""
    if (cache := own_cache(instance, EnginePrefixCache)) is None:
        return wrapped(*args, **kwargs)
    with cache.clearing(instance.resource_manager):
        cache.held_back.clear()
        if cache.storage is not None:
            cache.storage.clear()
            cache.storage.rows_dropped()
        try:
            return wrapped(*args, **kwargs)
        finally:
            cache.batch_dropped(new_weights=False)


def control_other_weights(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Wraps the control requests that may give the workers other weights. When the engine is paused its cache is empty;
    when it is not, FastDeploy refuses them, or they change nothing.
    """
    cache = own_cache(instance, EnginePrefixCache)
    if cache is not None and instance.is_paused:
        cache.manager.weights_changed()
        if cache.storage is not None:
            cache.storage.weights_changed()
    return wrapped(*args, **kwargs)


def control_with_request(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Wraps pause and resume: sleep and wakeup call them with None, and they ask it for its id."""

    def call(control_request: Any) -> Any:
        if control_request is None:
            from fastdeploy.engine.request import ControlRequest

            method = wrapped.__name__.removeprefix("_control_")
            control_request = ControlRequest(request_id=f"kvcache_v1_{method}", method=method)
        return wrapped(control_request)

    return call(*args, **kwargs)
