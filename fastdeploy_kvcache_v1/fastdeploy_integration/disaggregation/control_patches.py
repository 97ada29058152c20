"""Patches of FastDeploy's control requests, and of what it refuses while it is paused, for the roles."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from .. import Args, Kwargs, Wrapped
from ..engine.patches import control_with_request, own_cache
from .patches import tell_decode
from .pausing import end_requests
from .prefill_adapter import PrefillAdapter
from .role_caches import RoleCache

RECEIVES = "_insert_zmq_task_to_scheduler"
"""The function of FastDeploy whose local variable `request` has come from a client."""


def pause(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Wraps the control request that empties the cache, which peers read or fill: what is shared with them ends first.
    Sleep begins with it, and weight updates need it.
    """
    if (cache := own_cache(instance, RoleCache)) is None:  # type: ignore[type-abstract]
        return wrapped(*args, **kwargs)
    from fastdeploy.engine.request import RequestOutput

    cache.gate.close()
    try:
        if not instance.is_paused:
            end_requests(instance, cache, RequestOutput)
        return wrapped(*args, **kwargs)
    finally:
        if not instance.is_paused:  # it has failed, and the server goes on
            cache.gate.open()


def pause_with_request(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """As `pause`, over what 2.6 needs in all roles."""
    return pause(partial(control_with_request, wrapped, instance), instance, (args, kwargs), {})


def resume(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Wraps the end of a pause. Waking up ends with it."""
    if (cache := own_cache(instance, RoleCache)) is not None:  # type: ignore[type-abstract]
        cache.gate.open()
    return wrapped(*args, **kwargs)


def resume_with_request(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """As `resume`, over what 2.6 needs in all roles."""
    return resume(partial(control_with_request, wrapped, instance), instance, (args, kwargs), {})


def refuse_request(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Wraps the error with which FastDeploy refuses a request: a prefill server of 2.5 that is paused tells nobody
    else, and the client waits at the decode server.
    """

    def refuse(request_id: str, error_msg: str, *others: Any, **named: Any) -> None:
        wrapped(request_id, error_msg, *others, **named)
        if own_cache(instance, PrefillAdapter) is not None:
            request = _received(request_id)
            if request is not None and request.disaggregate_info is not None:
                tell_decode(instance.split_connector, request, error_msg)

    return refuse(*args, **kwargs)


def _received(request_id: str) -> Any:
    """The request that FastDeploy is taking from a client; None for one that it has had longer."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != RECEIVES:
        frame = frame.f_back  # type: ignore[assignment]
    request = None if frame is None else frame.f_locals.get("request")
    is_meant = getattr(request, "request_id", None) == request_id
    return request if is_meant else None
