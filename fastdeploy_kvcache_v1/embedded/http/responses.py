"""Response bodies of the OpenAI-compatible API: one dialect per endpoint, plain and streamed."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..engine.generation import Delta, Usage

DONE = "data: [DONE]\n\n"

Body = dict[str, Any]


def usage_body(usage: Usage) -> Body:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def event(body: Body) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


@dataclass
class Dialect(ABC):
    """Shapes one request's output. `return_token_ids` is our extension: the exact tokens, in every choice."""

    request_id: str
    model: str
    return_token_ids: bool = False
    include_usage: bool = False
    """Streams only: a last chunk without choices that carries the usage."""
    created: int = field(default_factory=lambda: int(time.time()))

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    @abstractmethod
    def opening(self) -> list[Body]:
        """Chunks before the first output."""

    @abstractmethod
    def _choice(self, text: str) -> Body: ...

    @abstractmethod
    def _chunk_choice(self, text: str) -> Body: ...

    def plain(self, deltas: list[Delta]) -> Body:
        """The whole answer; the last delta has finish reason and usage."""
        token_ids = tuple(token for delta in deltas for token in delta.token_ids)
        choice = self._choice("".join(delta.text for delta in deltas))
        last = deltas[-1]
        assert last.usage is not None, "the last delta carries the usage"
        body = self._body(self.kind, self._finish(choice, last.finish_reason, token_ids))
        return {**body, "usage": usage_body(last.usage)}

    def chunks(self, delta: Delta) -> list[Body]:
        """Chunks of one delta; none for a delta that shows nothing yet."""
        bodies: list[Body] = []
        if delta.text or delta.finish_reason or self.return_token_ids:
            choice = self._finish(self._chunk_choice(delta.text), delta.finish_reason, delta.token_ids)
            bodies.append(self._body(self.chunk_kind, choice))
        if delta.usage is not None and self.include_usage:
            bodies.append({**self._body(self.chunk_kind), "usage": usage_body(delta.usage)})
        return bodies

    def _finish(self, choice: Body, finish_reason: str | None, token_ids: tuple[int, ...]) -> Body:
        choice |= {"index": 0, "finish_reason": finish_reason, "logprobs": None}
        if self.return_token_ids:
            choice["token_ids"] = list(token_ids)
        return choice

    def _body(self, kind: str, *choices: Body) -> Body:
        return {
            "id": self.request_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": list(choices),
        }


class CompletionDialect(Dialect):
    kind = chunk_kind = "text_completion"

    def opening(self) -> list[Body]:
        return []

    def _choice(self, text: str) -> Body:
        return {"text": text}

    def _chunk_choice(self, text: str) -> Body:
        return {"text": text}


class ChatDialect(Dialect):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def opening(self) -> list[Body]:
        choice = self._finish({"delta": {"role": "assistant", "content": ""}}, None, ())
        return [self._body(self.chunk_kind, choice)]

    def _choice(self, text: str) -> Body:
        return {"message": {"role": "assistant", "content": text}}

    def _chunk_choice(self, text: str) -> Body:
        return {"delta": {"content": text} if text else {}}
