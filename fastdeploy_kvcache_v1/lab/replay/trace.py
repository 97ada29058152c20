"""Request traces, JSONL: Mooncake's, Qwen-Bailian's, and our own.

A line per request: `{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}`. A hash id
names `tokens_per_id` tokens of the prompt and all tokens before them. Without this field it is 512 as in Mooncake's, or
16 as in Qwen-Bailian's. Some formats name a last partial id too.

Optional fields: `output_hash_ids` go on from the prompt's last full id through the output. `session_id` is the same in
all lines of a session, and `delay` the milliseconds since the end of the turn before (Mooncake's). `return_in_s` is
what the client told: seconds from the end of this answer to its session's next request, or -1 for the last one.
`tool_call` is true for an answer that ends in a tool call.
`chat_id` and `parent_chat_id`, -1 for a first turn, are Qwen-Bailian's, whose timestamps are in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, field

from ...contract.sessions import checked_return
from ...errors import ConfigError, TraceError

SIZES = (512, 16)
"""Tokens of an id in traces without `tokens_per_id`."""

MAX_LENGTH = 2**31 - 1
"""Tokens of a prompt or output."""

Name = int | str
Time = Annotated[float, Meta(ge=0)]
Ids = tuple[Annotated[int, Meta(ge=0)], ...]


class TraceRequest(msgspec.Struct, kw_only=True):
    """A line, and values that follow from its place."""

    input_length: Annotated[int, Meta(ge=1, le=MAX_LENGTH)]
    output_length: Annotated[int, Meta(ge=0, le=MAX_LENGTH)]
    hash_ids: Ids
    timestamp_ms: Time = field(default=0, name="timestamp")
    output_hash_ids: Ids = ()
    """Ids from the prompt's partial id on through the output, if the trace has them."""
    tokens_per_id: Annotated[int, Meta(ge=1, le=MAX_LENGTH)] = 0
    """Tokens of an id, perhaps fewer for the last one; 0 while unknown."""
    session_id: Name | None = None
    delay_ms: Time | None = field(default=None, name="delay")
    """From the end of the turn before to this one, if the trace has it."""
    return_in_s: float | None = None
    tool_call: bool = False
    """The answer ends in a tool call."""
    """Told by the client."""
    chat_id: Name | None = None
    parent_chat_id: Name | None = None
    line: int = field(default=0, name="#line")
    """1-based line number. Not read from the line, like the next fields."""
    after: int | None = field(default=None, name="#after")
    """Line of the turn before, if it is in the trace."""
    session: str | None = field(default=None, name="#session")
    """Name of the session; that of a chat is its first `chat_id`."""

    @property
    def num_full_ids(self) -> int:
        """Ids that the prompt fills."""
        return self.input_length // self.tokens_per_id


def read_trace(path: Path, limit: int | None = None, *, tokens_per_id: int | None = None) -> list[TraceRequest]:
    """The first `limit` requests of `path`, by default all. Reads no further.

    Raises `TraceError` with file and line for a broken line, an empty trace, or an unknown size of ids without
    `tokens_per_id`.
    """
    if tokens_per_id is not None and tokens_per_id < 1:
        raise ConfigError(f"--tokens-per-id must be at least 1, got {tokens_per_id}")
    sizes: Sequence[int] = () if tokens_per_id is None else (tokens_per_id,)
    requests: list[TraceRequest] = []
    last: dict[tuple[str, Name], TraceRequest] = {}
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
    """Sizes of an id that fit all lines so far; `sizes` is empty before the first. Raises `ValueError` if none fits."""
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


def _place(request: TraceRequest, number: int, last: dict[tuple[str, Name], TraceRequest]) -> None:
    """Set the values that depend on its line number, and on the last lines of sessions and chats."""
    request.line = number
    before = None
    if request.return_in_s is not None:
        checked_return(request.return_in_s)
    if request.session_id is not None:
        request.session = str(request.session_id)
        before = last.get(("session", request.session_id))
        last["session", request.session_id] = request
    if request.chat_id is not None:
        request.timestamp_ms *= 1000
        request.session = str(request.chat_id)
        if request.parent_chat_id not in (None, -1):
            before = last.get(("chat", request.parent_chat_id))
        last["chat", request.chat_id] = request
    if before is not None:
        request.after, request.session = before.line, before.session


def _check_outputs(request: TraceRequest) -> None:
    """Raises `ValueError` for more output ids than the output fills."""
    most = -(-(request.input_length + request.output_length) // request.tokens_per_id) - request.num_full_ids
    if len(request.output_hash_ids) > most:
        raise ValueError(
            f"{request.output_length} output tokens after {request.input_length} need {most} output_hash_ids of "
            f"{request.tokens_per_id} tokens at most, got {len(request.output_hash_ids)}"
        )
