"""Request traces, JSONL: Mooncake's, Qwen-Bailian's, and our own.

One line per request: `{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}`. A hash id
stands for some tokens of the prompt (the last one for the rest, where a format names them), and for everything before
them. How many a line says in `tokens_per_id`; else 512, as in Mooncake's, or 16, as in Qwen-Bailian's.

Optional fields:

- `output_hash_ids`: ids that go on from the prompt's last full id through the output
- `session_id`: the same in all lines of a session; `delay`: milliseconds since the end of the turn before (Mooncake)
- `chat_id` and `parent_chat_id`, -1 for a first turn (Qwen-Bailian, whose timestamps are in seconds)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, field

from ...errors import ConfigError, TraceError

SIZES = (512, 16)
"""Tokens of an id in traces that do not say it."""

MAX_LENGTH = 2**31 - 1
"""Tokens of a prompt or output."""

Name = int | str
Time = Annotated[float, Meta(ge=0)]
Ids = tuple[Annotated[int, Meta(ge=0)], ...]


class TraceRequest(msgspec.Struct, kw_only=True):
    """What a line says, and what follows from where it stands."""

    input_length: Annotated[int, Meta(ge=1, le=MAX_LENGTH)]
    output_length: Annotated[int, Meta(ge=0, le=MAX_LENGTH)]
    hash_ids: Ids
    timestamp_ms: Time = field(default=0, name="timestamp")
    output_hash_ids: Ids = ()
    """Ids from the one that the prompt fills only in part on, through the output; empty where a trace has none."""
    tokens_per_id: Annotated[int, Meta(ge=1, le=MAX_LENGTH)] = 0
    """Tokens that an id stands for, the last one perhaps for fewer; 0 until it is known."""
    session_id: Name | None = None
    delay_ms: Time | None = field(default=None, name="delay")
    """From the end of the turn before to this one, where the trace says so."""
    chat_id: Name | None = None
    parent_chat_id: Name | None = None
    line: int = field(default=0, name="#line")
    """1-based line number: nothing that a line says, nor is the next one."""
    after: int | None = field(default=None, name="#after")
    """Line of the turn before, where the trace has sessions and that turn is in it."""

    @property
    def num_full_ids(self) -> int:
        """Ids that the prompt fills."""
        return self.input_length // self.tokens_per_id


def read_trace(path: Path, limit: int | None = None, *, tokens_per_id: int | None = None) -> list[TraceRequest]:
    """Read the first `limit` requests of `path` (all by default), and nothing behind them.

    Raises `TraceError` naming the file, and the line if one is broken. Also raised for a trace without requests, and
    for one whose number of tokens per id is unknown if `tokens_per_id` is not given.
    """
    if tokens_per_id is not None and tokens_per_id < 1:
        raise ConfigError(f"--tokens-per-id must be at least 1, got {tokens_per_id}")
    sizes: Sequence[int] = () if tokens_per_id is None else (tokens_per_id,)
    requests: list[TraceRequest] = []
    last: dict[tuple[str, Name], int] = {}
    number = 0
    try:
        with open(path, "rb") as file:
            for number, text in enumerate(file, start=1):
                if len(requests) == limit:
                    break
                if text.strip():
                    request = msgspec.json.decode(text, type=TraceRequest)
                    sizes = _sizes_left(sizes, request)
                    _place(request, number, last)
                    requests.append(request)
        for request in requests if len(sizes) == 1 else ():
            number, request.tokens_per_id = request.line, sizes[0]
            _check_outputs(request)
    except OSError as error:
        raise TraceError(f"cannot read trace {path}: {error.strerror}") from error
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise TraceError(f"{path}:{number}: {error}") from None
    if not requests:
        raise TraceError(f"trace {path} holds no requests")
    if len(sizes) > 1:
        raise TraceError(
            f"trace {path} does not tell how many tokens a hash id stands for ({_either(sizes)} fit all lines): "
            f"give --tokens-per-id"
        )
    return requests


def _sizes_left(sizes: Sequence[int], request: TraceRequest) -> Sequence[int]:
    """What an id may stand for after this line; `sizes` is empty before the first one. Raises `ValueError` for a line
    that fits none. Some formats name a last block that is not full, some do not.
    """
    stated, length, num_ids = request.tokens_per_id, request.input_length, len(request.hash_ids)
    sizes = sizes or ((stated,) if stated else SIZES)
    if stated and stated not in sizes:
        raise ValueError(f"tokens_per_id is {stated}, and {_either(sizes)} was given or fits the lines before")
    left = [size for size in sizes if stated in (0, size) and num_ids in (length // size, -(-length // size))]
    if not left:
        raise ValueError(
            f"{length} input tokens and {num_ids} hash ids do not fit {_either(sizes)} tokens per id: "
            f"another size needs --tokens-per-id"
        )
    return left


def _either(sizes: Sequence[int]) -> str:
    return " or ".join(map(str, sizes))


def _place(request: TraceRequest, number: int, last: dict[tuple[str, Name], int]) -> None:
    """What follows from its line number, and from those of every chat and of the last turn of every session."""
    request.line = number
    if request.session_id is not None:
        request.after = last.get(("session", request.session_id))
        last["session", request.session_id] = number
    if request.chat_id is not None:
        request.timestamp_ms *= 1000
        if request.parent_chat_id not in (None, -1):
            request.after = last.get(("chat", request.parent_chat_id))
        last["chat", request.chat_id] = number


def _check_outputs(request: TraceRequest) -> None:
    """Raises `ValueError` for more output ids than the output fills."""
    most = -(-(request.input_length + request.output_length) // request.tokens_per_id) - request.num_full_ids
    if len(request.output_hash_ids) > most:
        raise ValueError(
            f"{request.output_length} output tokens after {request.input_length} need {most} output_hash_ids of "
            f"{request.tokens_per_id} tokens at most, got {len(request.output_hash_ids)}"
        )
