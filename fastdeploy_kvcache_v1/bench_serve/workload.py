"""Prompts for a trace that has only lengths and hash ids: equal prefixes in the trace are equal prefixes here."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import ConfigError
from ..replay.trace import TOKENS_PER_ID, TraceRequest

FIRST_TOKEN, LAST_TOKEN = 97, 122
"""Ids every tokenizer has; lower-case letters for the byte tokenizer."""


@dataclass(frozen=True)
class Scale:
    """How much smaller than the trace the requests are. Raises `ConfigError` for values that cannot work."""

    divisor: int = 8
    """Prompt and output lengths are divided by it; it divides 512."""
    max_prompt_tokens: int = 2_000
    max_output_tokens: int = 16

    def __post_init__(self) -> None:
        if self.divisor < 1 or TOKENS_PER_ID % self.divisor:
            raise ConfigError(f"--divide must divide {TOKENS_PER_ID}, got {self.divisor}")
        for flag, value in (
            ("--max-prompt-tokens", self.max_prompt_tokens),
            ("--max-output-tokens", self.max_output_tokens),
        ):
            if value < 1:
                raise ConfigError(f"{flag} must be at least 1, got {value}")


@dataclass(frozen=True)
class ScaledRequest:
    """What is sent for one line of the trace."""

    line: int
    seconds: float
    """Its time in the trace."""
    prompt: list[int]
    max_tokens: int


def scaled(requests: Iterable[TraceRequest], scale: Scale) -> list[ScaledRequest]:
    """One request per line of the trace; prompts past the limit keep their beginning."""
    per_id = TOKENS_PER_ID // scale.divisor
    result = []
    for request in requests:
        length = max(1, min(request.input_length // scale.divisor, scale.max_prompt_tokens))
        prompt: list[int] = []
        for hash_id in request.hash_ids[: -(-length // per_id)]:
            prompt += tokens_of(hash_id, per_id)
        max_tokens = max(1, min(request.output_length // scale.divisor, scale.max_output_tokens))
        result.append(ScaledRequest(request.line, request.timestamp_ms / 1e3, prompt[:length], max_tokens))
    return result


def tokens_of(hash_id: int, count: int) -> list[int]:
    """The same `count` tokens for the same id, always."""
    return random.Random(hash_id).choices(range(FIRST_TOKEN, LAST_TOKEN + 1), k=count)
