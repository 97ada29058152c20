"""Sends requests to one OpenAI-compatible server and times their answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import httpx

from .report import Answer
from .workload import ScaledRequest

REQUEST_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Pace:
    """How fast requests are sent."""

    concurrency: int
    """Requests under way at once, at most."""
    speedup: float | None = None
    """Times the trace's own pace; None sends as fast as `concurrency` allows."""


async def send_all(
    url: str,
    requests: Sequence[ScaledRequest],
    pace: Pace,
    sampling: dict[str, Any],
    on_answer: Callable[[], object],
) -> list[Answer]:
    """Answers in the order of `requests`. A failed request is an answer with an error, never an exception."""
    slots = asyncio.Semaphore(pace.concurrency)
    begin = perf_counter()

    async def send_one(client: httpx.AsyncClient, request: ScaledRequest) -> Answer:
        try:
            return await _send(client, url, request, sampling)
        finally:
            slots.release()
            on_answer()

    limits = httpx.Limits(max_connections=pace.concurrency)
    async with httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, limits=limits) as client:
        tasks = []
        for request in requests:
            if pace.speedup is not None:
                await asyncio.sleep(max(0.0, begin + request.seconds / pace.speedup - perf_counter()))
            await slots.acquire()
            tasks.append(asyncio.create_task(send_one(client, request)))
        return await asyncio.gather(*tasks)


async def _send(client: httpx.AsyncClient, url: str, request: ScaledRequest, sampling: dict[str, Any]) -> Answer:
    answer = Answer(request.line)
    body = {
        "prompt": request.prompt,
        "max_tokens": request.max_tokens,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "seed": request.line,
        **sampling,
    }
    begin = perf_counter()
    try:
        async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                text = (await response.aread()).decode(errors="replace")
                answer.error = f"HTTP {response.status_code}: {text[:200]}"
                return answer
            async for chunk in _chunks(response):
                _add_chunk(answer, chunk, perf_counter() - begin)
    except (httpx.HTTPError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
        return answer
    answer.total_s = perf_counter() - begin
    if answer.error is None and len(answer.token_ids) != request.max_tokens:
        answer.error = f"{len(answer.token_ids)} tokens instead of {request.max_tokens}"
    return answer


async def _chunks(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events. Raises `ValueError` for a broken one."""
    async for line in response.aiter_lines():
        data = line.removeprefix("data:").strip()
        if line.startswith("data:") and data != "[DONE]":
            yield json.loads(data)


def _add_chunk(answer: Answer, chunk: dict[str, Any], seconds: float) -> None:
    if "error" in chunk:
        answer.error = str(chunk["error"])
    for choice in chunk.get("choices", ()):
        if choice.get("token_ids") and not answer.token_ids:
            answer.first_token_s = seconds
        answer.token_ids += choice.get("token_ids") or ()
    if usage := chunk.get("usage"):
        answer.prompt_tokens = usage["prompt_tokens"]
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
