"""Plays the requests against one server and takes down where their tokens came from."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx

from ..bench_serve.client import stream
from ..errors import WorkerDiedError
from ..metric_table import PREFIX
from .scenario import MAX_TOKENS, Message, Request

HOST_HITS = re.compile(rf"^{re.escape(PREFIX)}host_hit_tokens_total(?:{{[^}}]*}})? (\S+)$", re.MULTILINE)
DEVICE_HITS = re.compile(rf"^{re.escape(PREFIX)}device_hit_tokens_total(?:{{[^}}]*}})? (\S+)$", re.MULTILINE)
SETTLE_TIMEOUT_S = 3.0


@dataclass(frozen=True)
class Outcome:
    """What became of one request."""

    label: str
    text: str
    first_token_s: float
    total_s: float
    prompt_tokens: int
    device_tokens: int
    """Prompt tokens from the device tier."""
    host_tokens: int

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.device_tokens - self.host_tokens


def play_all(
    url: str, requests: Sequence[Request], *, model: str, caches: bool, on_outcome: Callable[[Outcome], object]
) -> list[Outcome]:
    """In order, one at a time. Raises `WorkerDiedError` when the server does not answer one."""
    return asyncio.run(_play_all(url, requests, model, caches, on_outcome))


async def _play_all(
    url: str, requests: Sequence[Request], model: str, caches: bool, on_outcome: Callable[[Outcome], object]
) -> list[Outcome]:
    by_label, texts = {request.label: request for request in requests}, dict[str, str]()
    outcomes = []
    async with httpx.AsyncClient(timeout=600.0) as client:
        await _ask(client, url, model, "warm-up", [{"role": "user", "content": "Hello."}])
        hits = await _hits(client, url) if caches else (0, 0)
        for request in requests:
            outcome = await _ask(client, url, model, request.label, request.messages(by_label, texts))
            if caches:
                before, hits = hits, await _settled_hits(client, url, hits, outcome.device_tokens)
                outcome = _with_tiers(outcome, device=hits[0] - before[0], host=hits[1] - before[1])
            texts[request.label] = outcome.text
            outcomes.append(outcome)
            on_outcome(outcome)
    return outcomes


async def _ask(client: httpx.AsyncClient, url: str, model: str, label: str, messages: list[Message]) -> Outcome:
    """All cached tokens count as the device tier's."""
    body = {"model": model, "messages": messages, "max_tokens": MAX_TOKENS, "return_token_ids": True}
    # Greedy by top_p as well: FastDeploy 2.5 makes 1 of temperature 0.
    answer = await stream(client, f"{url}/v1/chat/completions", {**body, "temperature": 0, "top_p": 0}, label)
    if answer.error is not None:
        raise WorkerDiedError(f"the server did not answer {label}: {answer.error}")
    times = answer.first_token_s, answer.total_s
    return Outcome(label, answer.text.strip(), *times, answer.prompt_tokens, answer.cached_tokens, 0)


def _with_tiers(outcome: Outcome, *, device: int, host: int) -> Outcome:
    measured = outcome.first_token_s, outcome.total_s, outcome.prompt_tokens
    return Outcome(outcome.label, outcome.text, *measured, device, host)


async def _settled_hits(client: httpx.AsyncClient, url: str, before: tuple[int, int], cached: int) -> tuple[int, int]:
    """The counters once they hold the `cached` tokens of the last answer: FastDeploy publishes them now and then."""
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while True:
        hits = await _hits(client, url)
        if sum(hits) >= sum(before) + cached or time.monotonic() > deadline:
            return hits
        await asyncio.sleep(0.05)


async def _hits(client: httpx.AsyncClient, url: str) -> tuple[int, int]:
    """Tokens served so far from the device and the host tier."""
    text = (await client.get(f"{url}/metrics")).text
    device, host = (sum(int(float(value)) for value in kind.findall(text)) for kind in (DEVICE_HITS, HOST_HITS))
    return device, host
