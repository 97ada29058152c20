"""Response bodies of the OpenAI-compatible API, plain and streamed, with FastDeploy's fields."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from ...contract.misses import Miss
from .engine.generation import Delta, Usage

DONE = "data: [DONE]\n\n"

Body = dict[str, Any]


@dataclass
class Answer:
    """Shapes the output of one request."""

    request_id: str
    model: str
    _: KW_ONLY
    is_chat: bool
    prompt_token_ids: tuple[int, ...] | None = None
    """If given, the answer has the token ids of prompt and output. `completion_token_ids` is FastDeploy's name,
    `token_ids` the name of other servers.
    """
    include_usage: bool = False
    """Streams only: the last chunk has the usage and no choices."""
    continuous_usage: bool = False
    """Streams only: each chunk has the usage so far."""
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, deltas: Sequence[Delta]) -> Body:
        """The answer of all deltas; the last one has finish reason and usage."""
        token_ids = [token for delta in deltas for token in delta.token_ids]
        text, last = "".join(delta.text for delta in deltas), deltas[-1]
        assert last.usage is not None, "the last delta carries the usage"
        ids = self._ids(prompt_token_ids=self.prompt_token_ids, completion_token_ids=token_ids)
        message = {"message": {"role": "assistant", "content": text, **ids}} if self.is_chat else {"text": text, **ids}
        choice = self._choice(message, token_ids, last.finish_reason)
        return {**self._body("chat.completion", [choice]), "usage": _usage_body(last.usage)}

    def opening(self) -> list[Body]:
        """Chunks before the first output."""
        ids = self._ids(prompt_token_ids=self.prompt_token_ids)
        if self.is_chat:
            return [self._chunk({"delta": {"content": "", **ids, "role": "assistant"}}, [], None)]
        return [self._chunk({"text": "", **ids}, [], None)] if ids else []

    def chunks(self, delta: Delta) -> list[Body]:
        """Chunks of one delta; none for a delta without text."""
        bodies: list[Body] = []
        if delta.text or delta.finish_reason or self.prompt_token_ids is not None:
            token_ids = list(delta.token_ids)
            ids = self._ids(completion_token_ids=token_ids)
            shown = {"delta": {"content": delta.text, **ids}} if self.is_chat else {"text": delta.text, **ids}
            bodies.append(self._chunk(shown, token_ids, delta.finish_reason))
            if self.continuous_usage and delta.usage is not None:
                bodies[0]["usage"] = _usage_body(delta.usage)
        if delta.finish_reason and delta.usage is not None and self.include_usage:
            bodies.append({**self._body("chat.completion.chunk", []), "usage": _usage_body(delta.usage)})
        return bodies

    def _chunk(self, shown: Body, token_ids: list[int], finish_reason: str | None) -> Body:
        return self._body("chat.completion.chunk", [self._choice(shown, token_ids, finish_reason)])

    def _choice(self, shown: Body, token_ids: list[int], finish_reason: str | None) -> Body:
        choice = {**shown, "index": 0, "finish_reason": finish_reason, "logprobs": None}
        return {**choice, **self._ids(token_ids=token_ids)}

    def _ids(self, **fields: Sequence[int] | None) -> Body:
        """`fields`, if the client wants token ids."""
        return {} if self.prompt_token_ids is None else fields

    def _body(self, kind: str, choices: list[Body]) -> Body:
        return {
            "id": self.request_id,
            "object": kind if self.is_chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def event(body: Body) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _usage_body(usage: Usage) -> Body:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, **_miss_body(usage.miss)},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def _miss_body(miss: Miss | None) -> Body:
    if miss is None:
        return {}
    tier, seconds = miss.tier_last_held, miss.evicted_s_ago
    return {
        "reason": miss.reason.value,
        "at_token": miss.at_token,
        "tier_last_held": None if tier is None else tier.value,
        "evicted_s_ago": None if seconds is None else round(seconds, 3),
        "blocks_short": miss.blocks_short,
    }
