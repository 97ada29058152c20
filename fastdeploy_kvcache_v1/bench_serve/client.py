"""Sends sessions to one OpenAI-compatible server and times the answers."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import httpx

from .report import Answer
from .session import Session

REQUEST_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Pace:
    """How fast sessions begin."""

    concurrency: int
    """Sessions under way at once, at most."""
    keeps_time: bool = False
    """Whether a session waits for its own begin; else the next one begins as soon as there is room."""


async def play(
    url: str,
    sessions: Sequence[Session],
    pace: Pace,
    sampling: dict[str, Any],
    on_answer: Callable[[], object],
) -> list[Answer]:
    """Answers in the order of sessions and turns. A failed request is an answer with an error, never an exception; the
    rest of its session is not sent.
    """
    slots = asyncio.Semaphore(pace.concurrency)
    begin = perf_counter()

    async def converse(client: httpx.AsyncClient, session: Session) -> list[Answer]:
        try:
            return await _converse(client, url, session, sampling, on_answer)
        finally:
            slots.release()

    limits = httpx.Limits(max_connections=pace.concurrency)
    async with httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, limits=limits) as client:
        tasks = []
        for session in sessions:
            if pace.keeps_time:
                await asyncio.sleep(max(0.0, begin + session.start_s - perf_counter()))
            await slots.acquire()
            tasks.append(asyncio.create_task(converse(client, session)))
        return [answer for answers in await asyncio.gather(*tasks) for answer in answers]


async def _converse(
    client: httpx.AsyncClient, url: str, session: Session, sampling: dict[str, Any], on_answer: Callable[[], object]
) -> list[Answer]:
    said: list[int] = []
    answers: list[Answer] = []
    for number, turn in enumerate(session.turns):
        name = session.name if len(session.turns) == 1 else f"{session.name} turn {number}"
        if answers and answers[-1].error is not None:
            answers.append(Answer(name, error="not sent: the turn before failed"))
        else:
            said += turn.tokens
            body = _body(name, said, turn.max_tokens, sampling)
            answer = await stream(client, f"{url}/v1/completions", body, name)
            if answer.error is None and len(answer.token_ids) != turn.max_tokens:
                answer.error = f"{len(answer.token_ids)} tokens instead of {turn.max_tokens}"
            said += answer.token_ids
            answers.append(answer)
        on_answer()
    return answers


def _body(name: str, prompt: list[int], max_tokens: int, sampling: dict[str, Any]) -> dict[str, Any]:
    fixed = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "return_token_ids": True}
    return {**fixed, "seed": zlib.crc32(name.encode()), **sampling}


async def stream(client: httpx.AsyncClient, url: str, body: dict[str, Any], name: str) -> Answer:
    """The answer to `body`, which is sent as a streamed request."""
    answer = Answer(name)
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    begin = perf_counter()
    try:
        async with client.stream("POST", url, json=body) as response:
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
        part = {**choice, **(choice.get("delta") or {})}  # a completion has no delta
        token_ids = part.get("completion_token_ids") or part.get("token_ids") or ()
        if token_ids and not answer.token_ids:
            answer.first_token_s = seconds
        answer.token_ids += token_ids
        answer.text += part.get("content") or part.get("text") or ""
    if usage := chunk.get("usage"):
        answer.prompt_tokens = usage["prompt_tokens"]
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
