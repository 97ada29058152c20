"""Request traces, JSONL: Mooncake's, Qwen-Bailian's, and our own.

One line per request: `{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}`. A hash id
stands for some tokens of the prompt (the last one for the rest, where a format names them), and for everything before
them. How many a line says in `tokens_per_id`; else 512, as in Mooncake's, or 16, as in Qwen-Bailian's.

Read besides, where it is there: `output_hash_ids`, which go on from the prompt's last full id through the output;
`session_id`, the same in all lines of a session, and `delay`, milliseconds between the end of the turn before and this
one (Mooncake's); `chat_id` and `parent_chat_id`, -1 for a first turn (Qwen-Bailian's, whose timestamps are in seconds).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Annotated, NamedTuple

import msgspec

from ..errors import ConfigError, TraceError

SIZES = (512, 16)
"""Tokens of an id in traces that do not say it."""

MAX_LINE_BYTES = 16 << 20
"""A line of a prompt of a million tokens has 20 KiB."""

MAX_LENGTH = 2**31 - 1
"""Tokens of a prompt or output."""

Name = int | str
Time = Annotated[float, msgspec.Meta(ge=0)]
Ids = tuple[Annotated[int, msgspec.Meta(ge=0)], ...]


class Line(msgspec.Struct):
    """What a line may say."""

    input_length: Annotated[int, msgspec.Meta(ge=1, le=MAX_LENGTH)]
    output_length: Annotated[int, msgspec.Meta(ge=0, le=MAX_LENGTH)]
    hash_ids: Ids
    timestamp: Time = 0
    output_hash_ids: Ids = ()
    tokens_per_id: Annotated[int, msgspec.Meta(ge=1, le=MAX_LENGTH)] | None = None
    session_id: Name | None = None
    delay: Time | None = None
    chat_id: Name | None = None
    parent_chat_id: Name | None = None


class TraceRequest(NamedTuple):
    """One line of a trace."""

    line: int
    """1-based line number."""
    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    tokens_per_id: int = 512
    """Tokens that an id stands for; the last one may stand for fewer."""
    after: int | None = None
    """Line of the turn before, where the trace has sessions and that turn is in it."""
    delay_ms: float | None = None
    """From the end of that turn to this one, where the trace says so."""
    output_hash_ids: tuple[int, ...] = ()
    """Ids from the one that the prompt fills only in part on, through the output; empty where a trace has none."""

    @property
    def num_full_ids(self) -> int:
        """Ids that the prompt fills."""
        return self.input_length // self.tokens_per_id


def read_trace(path: Path, limit: int | None = None, *, tokens_per_id: int | None = None) -> Iterator[TraceRequest]:
    """The first `limit` requests of `path` (all by default), read as they are asked for.

    A request waits for the lines after it until they tell how many tokens an id stands for, unless `tokens_per_id` is
    given. Raises `TraceError` naming the file, and the line for a broken one; a trace without requests is broken too,
    and one that does not tell the size of its ids.
    """
    if tokens_per_id is not None and tokens_per_id < 1:
        raise ConfigError(f"--tokens-per-id must be at least 1, got {tokens_per_id}")
    sizes: Sequence[int] = () if tokens_per_id is None else (tokens_per_id,)
    turns, held, count, number = Turns(), deque[TraceRequest](), 0, 0
    try:
        with open(path, "rb") as file:
            for number, raw in _lines(file):
                if count == limit:
                    break
                count += 1
                if len(raw) > MAX_LINE_BYTES:
                    raise ValueError(f"the line is longer than {MAX_LINE_BYTES >> 20} MiB")
                line = msgspec.json.decode(raw, type=Line)
                sizes = _sizes_left(sizes, line)
                held.append(_request(number, line, turns))
                while held and len(sizes) == 1:
                    number = held[0].line
                    yield _sized(held.popleft(), sizes[0])
    except OSError as error:
        raise TraceError(f"cannot read trace {path}: {error.strerror}") from error
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise TraceError(f"{path}:{number}: {error}") from None
    if not count:
        raise TraceError(f"trace {path} holds no requests")
    if held:
        raise TraceError(
            f"trace {path} does not tell how many tokens a hash id stands for ({_either(sizes)} fit all lines): "
            f"give --tokens-per-id"
        )


def _lines(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Lines that are not empty, with their numbers, and a byte more than the longest."""
    for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), start=1):
        if len(line) > MAX_LINE_BYTES or line.strip():
            yield number, line


def _sizes_left(sizes: Sequence[int], line: Line) -> Sequence[int]:
    """What an id may stand for after this line; `sizes` is empty before the first one. Raises `ValueError` for a line
    that fits none. Some formats name a last block that is not full, some do not.
    """
    stated, length, num_ids = line.tokens_per_id, line.input_length, len(line.hash_ids)
    sizes = sizes or ((stated,) if stated is not None else SIZES)
    if stated not in (None, *sizes):
        raise ValueError(f"tokens_per_id is {stated}, and {_either(sizes)} was given or fits the lines before")
    left = [size for size in sizes if stated in (None, size) and num_ids in (length // size, -(-length // size))]
    if not left:
        raise ValueError(
            f"{length} input tokens and {num_ids} hash ids do not fit {_either(sizes)} tokens per id: "
            f"another size needs --tokens-per-id"
        )
    return left


def _either(sizes: Sequence[int]) -> str:
    return " or ".join(map(str, sizes))


class Turns:
    """The last line of every session, and the line of every chat."""

    def __init__(self) -> None:
        self._sessions: dict[Name, int] = {}
        self._chats: dict[Name, int] = {}

    def follow(self, number: int, line: Line) -> int | None:
        """The line that `line` follows; None for a first turn, and where the turn before is not in the trace."""
        before = None
        if line.session_id is not None:
            before = self._sessions.get(line.session_id)
            self._sessions[line.session_id] = number
        if line.chat_id is not None:
            if line.parent_chat_id not in (None, -1):
                before = self._chats.get(line.parent_chat_id)
            self._chats[line.chat_id] = number
        return before


def _request(number: int, line: Line, turns: Turns) -> TraceRequest:
    """Raises `ValueError` for ids that no hash holds."""
    if max((*line.hash_ids, *line.output_hash_ids), default=0) >= 2**64:
        raise ValueError("a hash id must be below 2**64")
    return TraceRequest(
        line=number,
        timestamp_ms=line.timestamp * (1 if line.chat_id is None else 1000),
        input_length=line.input_length,
        output_length=line.output_length,
        hash_ids=line.hash_ids,
        after=turns.follow(number, line),
        delay_ms=line.delay,
        output_hash_ids=line.output_hash_ids,
    )


def _sized(request: TraceRequest, tokens_per_id: int) -> TraceRequest:
    """Raises `ValueError` for more output ids than the output fills."""
    request = request._replace(tokens_per_id=tokens_per_id)
    most = -(-(request.input_length + request.output_length) // tokens_per_id) - request.num_full_ids
    if len(request.output_hash_ids) > most:
        raise ValueError(
            f"{request.output_length} output tokens after {request.input_length} need {most} output_hash_ids of "
            f"{tokens_per_id} tokens at most, got {len(request.output_hash_ids)}"
        )
    return request
