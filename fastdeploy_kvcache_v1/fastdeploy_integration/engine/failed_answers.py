"""What FastDeploy's API servers answer when a request fails: an error, streamed or not.

Each release has forms of answer that say something else. 2.6 makes an empty answer with status 200 of an error; 2.5
looks for the tokens of an error, which has none; and of a completion that is not streamed both only log why it failed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

from .. import Args, Kwargs, Wrapped
from ..overlay import overlay

OK = 200

_reasons: ContextVar[list[str] | None] = ContextVar("reasons", default=None)
"""Of the completion that this task answers, why it failed."""


def get_connection(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Awaitable[Any]:
    """Wraps `DealerConnectionManager.get_connection`: every answer is made of what comes out of its queue."""

    async def connect() -> Any:
        dealer, queue = await wrapped(*args, **kwargs)
        begun: set[str] | None = set() if overlay.active().table.capabilities.reschedules else None
        queue.get = partial(_next_outputs, queue.get, begun, _reasons.get())
        return dealer, queue

    return connect()


async def _next_outputs(get: Callable[[], Awaitable[Any]], begun: set[str] | None, reasons: list[str] | None) -> Any:
    """Raises `ValueError`, as FastDeploy does where it looks, for an error. One of a request in `begun`, which has
    tokens, is left to FastDeploy; None where it has no answer for that either.
    """
    outputs = await get()
    for output in outputs:
        if not isinstance(output, dict) or "error_msg" not in output:  # the answer to a control request
            continue
        request_id = output["request_id"]
        code = output["error_code"]
        if code == OK or not isinstance(code, int):  # FastDeploy's default for embeddings and rewards is `(200,)`
            if begun is not None and (output["outputs"] or {}).get("token_ids"):
                begun.add(request_id)
        elif begun is None or request_id not in begun:
            reason = str(output["error_msg"])
            if reasons is not None:
                reasons.append(reason)
            raise ValueError(reason)
    return outputs


def completion_full_generator(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Awaitable[Any]:
    """Wraps `OpenAIServingCompletion.completion_full_generator`, which logs an error and returns None."""

    async def answer() -> Any:
        reasons: list[str] = []
        token = _reasons.set(reasons)
        try:
            made = await wrapped(*args, **kwargs)
        finally:
            _reasons.reset(token)
        if made is None:
            raise ValueError(reasons[0] if reasons else "the completion failed; the log of the API server says why")
        return made

    return answer()
