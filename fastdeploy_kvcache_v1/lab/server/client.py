"""Asks an OpenAI-compatible server, embedded or FastDeploy's, and times the answer: for the demo and benchmarks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import httpx

from ...errors import WorkerDiedError

REQUEST_TIMEOUT_S = 600.0


@dataclass
class Answer:
    """Of one streamed request."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    first_token_s: float = 0.0
    """From sending to the first token."""
    total_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that were not computed."""


def complete(url: str, tokens: tuple[int, ...], max_tokens: int) -> Answer:
    """Exactly `max_tokens` tokens behind the prompt `tokens`, greedy. Raises `WorkerDiedError`, as `ask`."""
    body = {"prompt": tokens, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0.0}
    answer = ask(f"{url}/v1/completions", body)
    if len(answer.token_ids) != max_tokens:
        raise WorkerDiedError(f"the server answered {len(answer.token_ids)} tokens instead of {max_tokens}")
    return answer


def ask(url: str, body: dict[str, Any]) -> Answer:
    """The answer to `body`, streamed. Raises `WorkerDiedError` for a refusal, a broken stream or a silent server."""
    answer = Answer()
    more = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    begin = perf_counter()
    try:
        with httpx.stream("POST", url, json={**body, **more}, timeout=REQUEST_TIMEOUT_S) as response:
            if not response.is_success:
                text = response.read().decode(errors="replace")
                raise WorkerDiedError(f"the server answered HTTP {response.status_code}: {text[:200]}")
            for chunk in _chunks(response):
                _add_chunk(answer, chunk, perf_counter() - begin)
    except (httpx.HTTPError, ValueError) as error:
        raise WorkerDiedError(f"the server did not answer: {type(error).__name__}: {error}") from error
    answer.total_s = perf_counter() - begin
    return answer


def _chunks(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events. Raises `ValueError` for a broken one."""
    for line in response.iter_lines():
        data = line.removeprefix("data:").strip()
        if line.startswith("data:") and data != "[DONE]":
            yield json.loads(data)


def _add_chunk(answer: Answer, chunk: dict[str, Any], seconds: float) -> None:
    if "error" in chunk:
        raise WorkerDiedError(f"the server answered an error: {chunk['error']}")
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
