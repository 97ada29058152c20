"""Patches of FastDeploy's engine for the roles: what they ask for, how long they wait, what an answer means."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from .. import Args, Kwargs, Wrapped
from ..engine.adapter import PrefixCacheAdapter
from ..engine.patches import EnginePrefixCache, own_cache
from ..engine.prompt_inputs import inputs_of
from ..overlay import overlay
from ..overlay.table import Where
from .decode_adapter import DecodeAdapter
from .first_tokens import FirstTokens
from .grants import FAILED, TRY_AGAIN
from .messager import Messager
from .pausing import DECODE_PAUSED, PREFILL_PAUSED
from .prefill_adapter import PrefillAdapter
from .role_caches import DecodeCache, PrefillCache
from .stored_prefixes import StoredPrefixes
from .transfer_name import drop_inputs, give_name

logger = logging.getLogger(__name__)


ASK_AGAIN_S = 0.05
FULL_S = 600.0
"""How long a prefill server asks a decode server that answers, and has no room."""

NO_ROOM = "Not enough resources"
"""FastDeploy's words for it."""

PROBE_S = 2.0


CACHES = {"mixed": EnginePrefixCache, "prefill": PrefillCache, "decode": DecodeCache}
"""By `--splitwise-role`."""


def make_cache_manager(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces the class `PrefixCacheManager` where the resource manager makes one."""

    def prefix_cache_manager(
        config: Any, tensor_parallel_size: int, splitwise_role: str = "mixed", local_data_parallel_id: int = 0
    ) -> EnginePrefixCache:
        overlay.active().require_complete(Where.ENGINE)
        return CACHES[splitwise_role](config)

    return prefix_cache_manager


def preallocate_in_prefill(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> bool:
    """Wraps `preallocate_resource_in_p`: what names the prompt is taken now, off the schedule loop. A request of an id
    that is in use waits, and one with blocks gets its name.
    """

    if own_cache(instance, PrefixCacheAdapter) is None:
        return bool(wrapped(*args, **kwargs))

    def preallocate(request: Any) -> bool:
        inputs_of(request)
        with instance.lock:
            other = instance.requests.get(request.request_id)
            if other is not None and other is not request and instance.tasks_list[other.idx] is other:
                return False
        is_done: bool = wrapped(request)
        if is_done:
            give_name(request)
        return is_done

    return preallocate(*args, **kwargs)


def tokens_to_compute(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> int:
    """Wraps `_get_num_new_tokens`, the first thing that FastDeploy asks of a request which it puts into the batch: on a
    prefill server it is matched now.
    """

    def ask(request: Any, token_budget: int) -> int:
        if (cache := own_cache(instance, PrefillAdapter)) is not None:
            cache.start(request, instance.get_prefix_cached_blocks)
        num_tokens: int = wrapped(request, token_budget)
        return num_tokens

    return ask(*args, **kwargs)


def preallocate_in_decode(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> bool:
    """Wraps `preallocate_resource_in_d`: a request that is sent twice gets blocks once, and its ranks fetch those that
    are not cached. One that comes while the server is paused gets none.
    """
    if (cache := own_cache(instance, DecodeAdapter)) is None:
        return bool(wrapped(*args, **kwargs))

    def preallocate(request: Any) -> bool:
        granted = cache.granted(request)
        if granted is not None:
            request.disaggregate_info["block_tables"] = granted.request.block_tables
            return True
        if request.request_id in instance.requests or not cache.may_grant(request):
            return False
        return cache.preallocate(request, wrapped)

    with cache.gate.passing() as is_open:
        return is_open and preallocate(*args, **kwargs)


def ask_for_room(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> tuple[bool, str]:
    """Wraps `check_decode_allocated`, which waits for a decode server's answer: asks again while that server has no
    room, and gives up when it is gone, does not answer, or stays full, and when this server is paused.
    """
    if (cache := own_cache(instance, PrefillCache)) is None:
        asked: tuple[bool, str] = wrapped(*args, **kwargs)
        return asked
    gate = cache.gate

    def ask(task: Any) -> tuple[bool, str]:
        info = task.disaggregate_info
        if info is None:
            return False, "this is a prefill server: send requests to the router"
        deadline = time.monotonic() + FULL_S
        while True:
            if not gate.is_open:
                instance.current_request_ids.pop(task.request_id, None)
                tell_decode(instance, task, TRY_AGAIN + PREFILL_PAUSED)
                return False, PREFILL_PAUSED
            where = info["decode_ip"], int(info["decode_connector_port"])
            if (reason := _unreachable(*where)) is not None:
                instance.current_request_ids.pop(task.request_id, None)
                return False, f"the decode server {where[0]}:{where[1]} cannot be reached: {reason}"
            granted, message = wrapped(task)
            if granted:
                drop_inputs(task)
                return True, message
            if message != NO_ROOM or time.monotonic() >= deadline:
                again = "" if message == NO_ROOM else TRY_AGAIN
                tell_decode(instance, task, f"{again}the decode server gives {task.request_id} no room: {message}")
                return False, message
            time.sleep(ASK_AGAIN_S)
            instance.send_splitwise_tasks([task], task.idx)

    return ask(*args, **kwargs)


def tell_decode(connector: Any, task: Any, reason: str) -> None:
    """The client of a request that ends here waits there: FastDeploy would tell nobody but the router, which waits for
    the decode server.
    """
    from fastdeploy.engine.request import RequestOutput

    error = RequestOutput(
        request_id=task.request_id,
        finished=True,
        metrics=task.metrics,
        error_code=FAILED,
        error_msg=reason,
        ic_req_data=task.ic_req_data,
    )
    connector.send_first_token(task.disaggregate_info, [error])


def _unreachable(host: str, port: int) -> str | None:
    """Why nothing listens there; None when something does. FastDeploy's messages to nobody are lost without a sign."""
    try:
        socket.create_connection((host, port), PROBE_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def tell_prefill(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> None:
    """Wraps `send_cache_info_to_prefill`: 2.5 does not say that it has no room, and prefill would wait for 30 s. A
    paused server says so: it is not asked again.
    """
    if (cache := own_cache(instance, DecodeAdapter)) is None:
        wrapped(*args, **kwargs)
        return
    gate = cache.gate

    def tell(tasks: list[Any]) -> None:
        for task in tasks:
            error = task.get("error_msg", None)
            if error is not None and task.disaggregate_info is not None:
                info = task.disaggregate_info
                where = f"{info['prefill_ip']}:{info['prefill_connector_port']}"
                refusal = [{"request_id": task.request_id, "error_msg": error if gate.is_open else DECODE_PAUSED}]
                instance._send_message(where, "cache_sync", refusal)
        granted = [task for task in tasks if task.get("error_msg", None) is None]
        if granted:
            wrapped(granted)

    tell(*args, **kwargs)


def blocks_to_start(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> int:
    """Wraps `_get_can_schedule_prefill_threshold_block`: a decode server's request that needs no new block starts, also
    when there is no reserve for those that run. Else a full server starts nothing, and so nothing ends.
    """

    def blocks(num_chunk_new_block: int) -> int:
        if num_chunk_new_block == 0 and own_cache(instance, DecodeAdapter) is not None:
            return 0
        needed: int = wrapped(num_chunk_new_block)
        return needed

    return blocks(*args, **kwargs)


def answer_for_messager(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> None:
    """Wraps `TokenProcessor.set_resource_manager`, which comes before a messager is asked anything: see `Messager`."""

    def set_manager(resource_manager: Any) -> None:
        wrapped(resource_manager)
        if (cache := own_cache(resource_manager, PrefillCache)) is not None:
            acknowledges = overlay.active().table.capabilities.acknowledged_cache_info
            Messager(cache.take_transfer_ends, acknowledges=acknowledges).answer(instance.engine_worker_queue)

    set_manager(*args, **kwargs)


def process_in_decode(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Wraps the start of the thread that takes what prefill servers send: see `FirstTokens`."""
    if (cache := own_cache(instance, DecodeAdapter)) is not None:
        from fastdeploy.engine.request import RequestOutput

        queue = instance.engine_worker_queue
        tokens = FirstTokens(instance, cache, RequestOutput, _on_end())
        is_empty, take = queue.disaggregate_queue_empty, queue.get_disaggregated_tasks
        queue.disaggregate_queue_empty = lambda: tokens.is_empty(is_empty)
        queue.get_disaggregated_tasks = lambda: tokens.take(take)
    return wrapped(*args, **kwargs)


def _on_end() -> Callable[[], None]:
    from fastdeploy.metrics.metrics import main_process_metrics

    if not overlay.active().table.capabilities.counts_preallocated:
        return lambda: None
    gauge = main_process_metrics.decode_preallocated_req_num
    return lambda: gauge.dec()


def take_requests(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Wraps the start of the threads that bring requests: those of a prefill server take one at a time, which may have
    waited for its stored prefix, see `StoredPrefixes`.
    """
    if (cache := own_cache(instance, PrefillAdapter)) is not None:
        scheduler = instance.scheduler
        if cache.storage is not None:
            prefixes = StoredPrefixes(scheduler, cache.storage, cache.waits_for_storage)
            scheduler.get_requests = partial(prefixes.get_requests, scheduler.get_requests)
        scheduler.get_requests = partial(one_request, scheduler.get_requests)
    return wrapped(*args, **kwargs)


def one_request(take: Callable[..., list[Any]], *args: Any, batch: int = 1, **limits: Any) -> list[Any]:
    """In place of `take`, the scheduler's `get_requests`. A thread gives each request that it has taken a seat and
    blocks before any of them goes on: of several threads, each with some of what it needs, none would.
    """
    return take(*args, batch=min(batch, 1), **limits)
