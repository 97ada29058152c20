"""Sessions from a trace that has only lengths and hash ids: equal prefixes in the trace are equal prefixes here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import ConfigError
from ..replay.trace import TraceRequest
from .session import Session, Turn, random_tokens


@dataclass(frozen=True)
class Scale:
    """How much smaller than the trace the requests are. Raises `ConfigError` for values that cannot work."""

    divisor: int = 8
    """Prompt and output lengths are divided by it; it divides the tokens of a hash id."""
    max_prompt_tokens: int = 2_000
    max_output_tokens: int = 16
    speedup: float = 1.0
    """Times the trace's own pace."""

    def __post_init__(self) -> None:
        if self.divisor < 1:
            raise ConfigError(f"--divide must be at least 1, got {self.divisor}")
        for flag, value in (
            ("--max-prompt-tokens", self.max_prompt_tokens),
            ("--max-output-tokens", self.max_output_tokens),
        ):
            if value < 1:
                raise ConfigError(f"{flag} must be at least 1, got {value}")
        if not self.speedup > 0:
            raise ConfigError(f"--speedup must be more than 0, got {self.speedup}")


def scaled(requests: Iterable[TraceRequest], scale: Scale) -> list[Session]:
    """One session of one turn per line of the trace; prompts past the limit keep their beginning.

    Raises `ConfigError` unless the divisor divides the tokens that a hash id stands for.
    """
    sessions = []
    for request in requests:
        if request.tokens_per_id % scale.divisor:
            tokens = request.tokens_per_id
            raise ConfigError(
                f"--divide must divide the {tokens} tokens of a hash id of the trace, got {scale.divisor}"
            )
        per_id = request.tokens_per_id // scale.divisor
        length = max(1, min(request.input_length // scale.divisor, scale.max_prompt_tokens))
        prompt: list[int] = []
        for hash_id in request.hash_ids[: -(-length // per_id)]:
            prompt += random_tokens(hash_id, per_id)
        if len(prompt) < length:  # a last block that is not full has no id
            prompt += random_tokens(-request.line, length - len(prompt))
        max_tokens = max(1, min(request.output_length // scale.divisor, scale.max_output_tokens))
        start_s = request.timestamp_ms / 1e3 / scale.speedup
        sessions.append(Session(f"trace line {request.line}", (Turn(tuple(prompt[:length]), max_tokens),), start_s))
    return sessions
