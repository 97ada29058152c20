"""Response bodies of the OpenAI-compatible API: one dialect per endpoint, plain and streamed."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass, field
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
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def event(body: Body) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


@dataclass
class Dialect(ABC):
    """Shapes one request's output, in the fields of OpenAI's API and of FastDeploy."""

    request_id: str
    model: str
    _: KW_ONLY
    prompt_token_ids: tuple[int, ...] | None = None
    """Given: the answer also has the exact tokens of prompt and output. `completion_token_ids` is FastDeploy's name,
    `token_ids` that of other servers.
    """
    include_usage: bool = False
    """Streams only: a last chunk without choices that carries the usage."""
    continuous_usage: bool = False
    """Streams only: the usage so far in every chunk of output."""
    created: int = field(default_factory=lambda: int(time.time()))

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    @abstractmethod
    def opening(self) -> list[Body]:
        """Chunks before the first output."""

    @abstractmethod
    def _choice(self, text: str, tokens: Body) -> Body:
        """The answer's text and its `tokens`, where FastDeploy has them."""

    @abstractmethod
    def _chunk_choice(self, text: str, tokens: Body) -> Body: ...

    def plain(self, deltas: list[Delta]) -> Body:
        """The whole answer; the last delta has finish reason and usage."""
        token_ids = [token for delta in deltas for token in delta.token_ids]
        last = deltas[-1]
        assert last.usage is not None, "the last delta carries the usage"
        choice = self._choice("".join(delta.text for delta in deltas), {**self._prompt_ids(), **self._ids(token_ids)})
        body = self._body(self.kind, self._finish(choice, last.finish_reason, token_ids))
        return {**body, "usage": usage_body(last.usage)}

    def chunks(self, delta: Delta) -> list[Body]:
        """Chunks of one delta; none for a delta that shows nothing yet."""
        bodies: list[Body] = []
        if delta.text or delta.finish_reason or self.prompt_token_ids is not None:
            token_ids = list(delta.token_ids)
            choice = self._finish(self._chunk_choice(delta.text, self._ids(token_ids)), delta.finish_reason, token_ids)
            body = self._body(self.chunk_kind, choice)
            if self.continuous_usage and delta.usage is not None:
                body["usage"] = usage_body(delta.usage)
            bodies.append(body)
        if delta.finish_reason and delta.usage is not None and self.include_usage:
            bodies.append({**self._body(self.chunk_kind), "usage": usage_body(delta.usage)})
        return bodies

    def _finish(self, choice: Body, finish_reason: str | None, token_ids: list[int]) -> Body:
        choice |= {"index": 0, "finish_reason": finish_reason, "logprobs": None}
        if self.prompt_token_ids is not None:
            choice["token_ids"] = token_ids
        return choice

    def _ids(self, token_ids: list[int]) -> Body:
        return {} if self.prompt_token_ids is None else {"completion_token_ids": token_ids}

    def _prompt_ids(self) -> Body:
        return {} if self.prompt_token_ids is None else {"prompt_token_ids": list(self.prompt_token_ids)}

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
        if self.prompt_token_ids is None:
            return []
        return [self._body(self.chunk_kind, self._finish(self._chunk_choice("", self._prompt_ids()), None, []))]

    def _choice(self, text: str, tokens: Body) -> Body:
        return {"text": text, **tokens}

    def _chunk_choice(self, text: str, tokens: Body) -> Body:
        return {"text": text, **tokens}


class ChatDialect(Dialect):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def opening(self) -> list[Body]:
        choice = self._chunk_choice("", self._prompt_ids())
        choice["delta"]["role"] = "assistant"
        return [self._body(self.chunk_kind, self._finish(choice, None, []))]

    def _choice(self, text: str, tokens: Body) -> Body:
        return {"message": {"role": "assistant", "content": text, **tokens}}

    def _chunk_choice(self, text: str, tokens: Body) -> Body:
        return {"delta": {"content": text, **tokens}}
