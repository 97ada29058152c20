"""The same 64 requests for every configuration: conversations with shared prefixes, long and short, concurrent."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from openai import OpenAI

NUM_CONVERSATIONS = 16
TURNS = 4
NUM_REQUESTS = NUM_CONVERSATIONS * TURNS
CONCURRENCY = 12
RETURNS = (-1, 0, 0.01, 1.5, 60, 86_400)
WORDS = ("cache", "block", "prefix", "tier", "device", "host", "copy", "layer", "stream", "event", "token", "slot")


@dataclass(frozen=True)
class Conversation:
    """Each turn's prompt is everything before it, the answers included, and one more question."""

    index: int
    system: str
    questions: tuple[str, ...]
    max_tokens: tuple[int, ...]
    is_chat: bool
    streams: bool
    options: dict[str, Any]


def conversations() -> list[Conversation]:
    rng = random.Random(20)
    text = lambda low, high: " ".join(rng.choices(WORDS, k=rng.randrange(low, high)))  # noqa: E731
    systems = [text(2, 50) for _ in range(6)]
    return [
        Conversation(
            index,
            rng.choice(systems),
            tuple(text(1, 12) for _ in range(TURNS)),
            (*(rng.randrange(1, 13) for _ in range(TURNS - 1)), rng.randrange(90, 130)),
            is_chat=index % 2 == 0,
            streams=index % 3 == 0,
            options={"temperature": 0} if index % 4 else {"temperature": 0.8, "top_p": 0.9, "seed": index},
        )
        for index in range(NUM_CONVERSATIONS)
    ]


def run_workload(client: OpenAI, *, hints: bool = False) -> dict[tuple[int, int], list[int]]:
    """Output tokens by conversation and turn. `hints`: requests have random ones, and more arrive meanwhile."""
    outputs: dict[tuple[int, int], list[int]] = {}
    with ThreadPoolExecutor(CONCURRENCY + 1) as pool, ExitStack() as stack:
        if hints:
            over = threading.Event()
            stack.callback(lambda telling: over.set() or telling.result(), pool.submit(_tell, client, over))
        for conversation, turns in pool.map(lambda each: (each, _converse(client, each, hints=hints)), conversations()):
            outputs.update({(conversation.index, turn): tokens for turn, tokens in enumerate(turns)})
    return outputs


def _tell(client: OpenAI, over: threading.Event) -> None:
    """Tell random times of return at random times, true or not."""
    rng, answers = random.Random(22), []
    while not over.wait(rng.uniform(0, 0.02)):
        body = {"session_id": _session(rng), "return_in_s": rng.choice(RETURNS)}
        answers.append(client.post("/cache/session", cast_to=object, body=body))
    assert answers
    assert all(set(answer) == {"known"} for answer in answers)


def _session(rng: random.Random) -> str:
    return f"session-{rng.randrange(NUM_CONVERSATIONS)}"


def _hint(rng: random.Random) -> dict[str, Any]:
    """Options of a request: a session, perhaps another one than before, and when it returns, true or not."""
    told = {"return_in_s": rng.choice(RETURNS)} if rng.random() < 0.5 else {}
    place = rng.choice(("session_id", "prompt_cache_key", "user", "X-Session-ID", None))
    if place == "X-Session-ID":
        return {"extra_headers": {place: _session(rng)}, "extra_body": told}
    return {"extra_body": told | ({} if place is None else {place: _session(rng)})}


def _converse(client: OpenAI, conversation: Conversation, *, hints: bool) -> list[list[int]]:
    rng = random.Random(conversation.index)
    messages: list[dict[str, str]] = [{"role": "system", "content": conversation.system}]
    outputs = []
    for question, max_tokens in zip(conversation.questions, conversation.max_tokens, strict=True):
        messages.append({"role": "user", "content": question})
        text, tokens = _ask(client, conversation, messages, max_tokens, _hint(rng) if hints else {})
        messages.append({"role": "assistant", "content": text})
        outputs.append(tokens)
    return outputs


def _ask(
    client: OpenAI, conversation: Conversation, messages: list[dict[str, str]], max_tokens: int, hint: dict[str, Any]
) -> tuple[str, list[int]]:
    options: dict[str, Any] = {
        "model": "random-tiny",
        "max_tokens": max_tokens,
        "stream": conversation.streams,
        **conversation.options,
        **hint,
        "extra_body": {"return_token_ids": True, "ignore_eos": True, **hint.get("extra_body", {})},
    }
    if conversation.is_chat:
        answer = client.chat.completions.create(messages=messages, **options)
    else:
        prompt = "\n".join(message["content"] for message in messages)
        answer = client.completions.create(prompt=prompt, **options)
    chunks = list(answer) if conversation.streams else [answer]
    text, tokens = "", []
    for chunk in chunks:
        choice = chunk.choices[0]
        tokens += choice.token_ids
        if not conversation.is_chat:
            text += choice.text
        else:
            text += (choice.delta if conversation.streams else choice.message).content or ""
    assert len(tokens) == max_tokens
    return text, tokens
