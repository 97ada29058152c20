"""Seats that preempted requests keep while they wait: 2.5 forgets them when it looks for room for others, 2.6 counts
them against the requests that have them.
"""

from __future__ import annotations

from typing import Any

from .. import Args, Kwargs, Wrapped
from .adapter import PrefixCacheAdapter
from .patches import get_prefix_cached_blocks_in_turn, own_cache, schedule


def get_prefix_cached_blocks(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> bool:
    """Wraps the match of a waiting request in 2.5: one that waits for a seat is not matched in each batch till then."""

    def match(request: Any) -> bool:
        if own_cache(instance, PrefixCacheAdapter) is not None and _waits_for_seat(instance, request):
            return False
        return get_prefix_cached_blocks_in_turn(wrapped, instance, (request,), {})

    return match(*args, **kwargs)


def blocks_to_start(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Wraps the number of blocks that must be free before 2.5 starts a waiting request, with prefix caching or without.
    Without a seat it is more than there are, so the request goes on waiting: with one too many, `schedule` would raise.
    """

    def ask(request: Any, num_blocks: int) -> Any:
        cache = own_cache(instance, PrefixCacheAdapter)
        if cache is not None and _waits_for_seat(instance, request):
            return cache.num_gpu_blocks + 1
        return wrapped(request, num_blocks)

    return ask(*args, **kwargs)


def schedule_with_a_seat(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Wraps `ResourceManagerV1.schedule` of 2.6, which starts none of the preempted requests while those that wait have
    all seats. It never comes to that by itself: one is left that runs, until a batch with all of them is lost.
    """
    if own_cache(instance, PrefixCacheAdapter) is not None:
        let_one_start(instance)
    return schedule(wrapped, instance, args, kwargs)


def let_one_start(manager: Any) -> None:
    """If nothing runs, and nothing can: the one that waits last becomes a new request, which 2.6 does not count. In a
    mixed server a new request gets a seat when it is scheduled, so it gives its own back.
    """
    with manager.lock:
        preempted = [each for each in manager.waiting if each.status.name == "PREEMPTED"]
        is_stuck = len(preempted) >= manager.max_num_seqs and not manager.running
        if not is_stuck or manager.to_be_rescheduled_request_id_set or manager.to_be_aborted_req_id_set:
            return
        request = preempted[-1]
        request.status = type(request.status).WAITING
        request.need_prefill_tokens = request.num_total_tokens  # its output tokens stay
        if manager.config.scheduler_config.splitwise_role == "mixed":
            manager.tasks_list[request.idx], manager.stop_flags[request.idx] = None, True
            manager.req_dict.pop(request.request_id, None)
            request.idx = None


def _waits_for_seat(manager: Any, request: Any) -> bool:
    """Preempted requests have theirs, and so has a new one on a prefill server, where it waits for a decode server."""
    if request.status.name != "WAITING" or any(manager.stop_flags):
        return False
    return request.idx is None or manager.tasks_list[request.idx] is not request
