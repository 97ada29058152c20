"""Request traces, JSONL, and block hashes for them.

One line per request: `{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}`. A hash id
stands for some tokens of the prompt (the last one for the rest), and for everything before them; how many follows from
the lines, see `id_size.py`. Read besides, where it is there: `session_id`, `delay`, `chat_id`, `parent_chat_id`, see
`turns.py` (a line with `chat_id` is Qwen-Bailian's: its timestamp is in seconds); `tokens_per_id`; and
`output_hash_ids`, which go on from the prompt's last full id through the output.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, NamedTuple

from ..errors import ConfigError, TraceError
from ..metadata import BlockHash
from .id_size import IdSize
from .turns import Turns

DIGEST_BYTES = 32
INDEX_BYTES = 4

MAX_LINE_MIB = 16
"""A line of a prompt of a million tokens has 20 KiB."""

MAX_LENGTH = 2**31 - 1
"""Tokens of a prompt or output."""

MAX_SHOWN = 80
"""Characters of a value that a complaint quotes."""


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
    size, turns, held, count = IdSize(tokens_per_id), Turns(), list[TraceRequest](), 0
    try:
        with open(path, "rb") as file:
            for number, line in _lines(path, file):
                if count == limit:
                    break
                held.append(_parse(path, number, line, size, turns))
                count += 1
                if (tokens := size.tokens) is not None:
                    for request in held:
                        yield _sized(path, request, tokens)
                    held.clear()
    except OSError as error:
        raise TraceError(f"cannot read trace {path}: {error.strerror}") from error
    if not count:
        raise TraceError(f"trace {path} holds no requests")
    if held:
        raise TraceError(
            f"trace {path} does not tell how many tokens a hash id stands for ({_few(size.possible)} fit all lines): "
            f"give --tokens-per-id"
        )


def _lines(path: Path, file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Lines that are not empty, with their numbers."""
    for number, line in enumerate(iter(lambda: file.readline((MAX_LINE_MIB << 20) + 1), b""), start=1):
        if len(line) > MAX_LINE_MIB << 20:
            raise TraceError(f"{path}:{number}: the line is longer than {MAX_LINE_MIB} MiB")
        if line.strip():
            yield number, line


def _parse(path: Path, number: int, line: bytes, size: IdSize, turns: Turns) -> TraceRequest:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}:{number}: not a JSON object: {error}") from error
    if not isinstance(fields, dict):
        raise TraceError(f"{path}:{number}: not a JSON object")
    try:
        request = TraceRequest(
            line=number,
            timestamp_ms=_timestamp_ms(fields),
            input_length=_integer(fields, "input_length", least=1),
            output_length=_integer(fields, "output_length", least=0),
            hash_ids=_ids(fields, "hash_ids"),
            after=turns.follow(number, fields),
            delay_ms=None if fields.get("delay") is None else _number(fields, "delay", "milliseconds"),
            output_hash_ids=_ids(fields, "output_hash_ids") if "output_hash_ids" in fields else (),
        )
        stated = None if fields.get("tokens_per_id") is None else _integer(fields, "tokens_per_id", least=1)
    except ValueError as error:
        raise TraceError(f"{path}:{number}: {error}") from None
    complaint = size.add(request.input_length, len(request.hash_ids), stated)
    if complaint is not None:
        raise TraceError(f"{path}:{number}: {complaint}")
    return request


def _sized(path: Path, request: TraceRequest, tokens_per_id: int) -> TraceRequest:
    """Raises `TraceError` for more output ids than the output fills."""
    request = request._replace(tokens_per_id=tokens_per_id)
    most = -(-(request.input_length + request.output_length) // tokens_per_id) - request.num_full_ids
    if len(request.output_hash_ids) > most:
        raise TraceError(
            f"{path}:{request.line}: {request.output_length} output tokens after {request.input_length} need "
            f"{most} output_hash_ids of {tokens_per_id} tokens at most, got {len(request.output_hash_ids)}"
        )
    return request


def _timestamp_ms(fields: dict[str, Any]) -> float:
    """Since the beginning of the trace; 0 where there is none."""
    if "timestamp" not in fields:
        return 0
    if "chat_id" in fields:
        return 1000 * _number(fields, "timestamp", "seconds")
    return _number(fields, "timestamp", "milliseconds")


def _number(fields: dict[str, Any], name: str, unit: str) -> float:
    value = fields[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(f"{name} must be a number of {unit}, got {_shown(value)}")
    return value


def _integer(fields: dict[str, Any], name: str, *, least: int) -> int:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_LENGTH:
        raise ValueError(f"{name} must be an integer from {least} to {MAX_LENGTH}, got {_shown(value)}")
    return value


def _ids(fields: dict[str, Any], name: str) -> tuple[int, ...]:
    value = fields.get(name)
    if not isinstance(value, list):
        raise ValueError(f"{name} must be a list of integers, got {type(value).__name__}")
    for item in value:
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < 2**64:
            raise ValueError(f"hash ids must be integers in 0..2**64-1, got {_shown(item)}")
    return tuple(value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _few(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes)) if len(sizes) <= 4 else f"{sizes[0]}, {sizes[1]}, ... {sizes[-1]}"


class TraceHasher:
    """Turns the ids of a trace into hashes of `block_size`-token blocks. Not thread-safe.

    An id names its tokens *and* everything before them, so in a well-formed trace it always has the same parent id.
    Where one does not (Qwen-Bailian's name the tokens alone), it means the same tokens after another prefix, which is
    another block: the digest is chained over the parent's, so the two never match. `num_reparented_ids` counts them.

    One SHA-256 per id. Blocks of an id that stands for several share its digest and differ in an index; a block of
    several ids has the digest of the last one. Equal hashes mean an equal prefix, as with `cache_utils.BlockHasher`.
    """

    def __init__(self, block_size: int) -> None:
        self.num_reparented_ids = 0
        self._block_size = block_size
        self._parents: dict[int, int] = {}

    def prompt_hashes(self, request: TraceRequest) -> list[BlockHash]:
        """One hash per full block of the prompt, in prompt order. What no id names has a name of its own.

        Raises `ConfigError` unless the block size divides `tokens_per_id`, or is a multiple of it.
        """
        self._count_reparented(request.hash_ids)
        return self._hashes(request, request.input_length)

    def output_hashes(self, request: TraceRequest) -> list[BlockHash]:
        """Hashes of the full blocks after `prompt_hashes`: generated tokens.

        Where the trace does not name them they are unique to the request: a later turn of the same conversation does
        not hit them.
        """
        first = request.input_length // self._block_size
        num_tokens = request.input_length + request.output_length
        if request.output_hash_ids:
            return self._hashes(request, num_tokens)[first:]
        return self._own_names(request, first, num_tokens // self._block_size)

    def _count_reparented(self, ids: Sequence[int]) -> None:
        parent = -1
        for hash_id in ids:
            self.num_reparented_ids += self._parents.setdefault(hash_id, parent) != parent
            parent = hash_id

    def _hashes(self, request: TraceRequest, num_tokens: int) -> list[BlockHash]:
        """Of the first `num_tokens` tokens of the prompt, and the output as far as ids name it."""
        per_id, size = request.tokens_per_id, self._block_size
        if size < 1 or (size % per_id and per_id % size):
            raise ConfigError(
                f"block size {size} must divide the {per_id} tokens of a hash id of the trace, or be a multiple of them"
            )
        num_blocks, num_full = num_tokens // size, request.num_full_ids
        # An id that prompt and output fill together is known by its name at the end, as a later turn knows it.
        ids = request.hash_ids[:num_full] + (request.output_hash_ids or request.hash_ids[num_full:])
        hashes = self._of_parts(ids, per_id // size) if size <= per_id else self._of_chains(ids, size // per_id)
        del hashes[num_blocks:]
        return hashes + self._own_names(request, len(hashes), num_blocks)

    @staticmethod
    def _of_parts(ids: Sequence[int], blocks_per_id: int) -> list[BlockHash]:
        """An id stands for `blocks_per_id` blocks."""
        hashes: list[BlockHash] = []
        indices = [index.to_bytes(INDEX_BYTES, "little") for index in range(blocks_per_id)]
        digest = bytes(DIGEST_BYTES)
        for hash_id in ids:
            digest = sha256(digest + hash_id.to_bytes(8, "little")).digest()
            stem = digest[:-INDEX_BYTES]
            hashes.extend([BlockHash(stem + index) for index in indices])
        return hashes

    @staticmethod
    def _of_chains(ids: Sequence[int], ids_per_block: int) -> list[BlockHash]:
        """A block is `ids_per_block` ids; a block that is not full has no hash."""
        hashes: list[BlockHash] = []
        digest = bytes(DIGEST_BYTES)
        for position, hash_id in enumerate(ids, start=1):
            digest = sha256(digest + hash_id.to_bytes(8, "little")).digest()
            if position % ids_per_block == 0:
                hashes.append(BlockHash(digest))
        return hashes

    def _own_names(self, request: TraceRequest, first: int, end: int) -> list[BlockHash]:
        stem = sha256(b"tokens without an id of trace line %d" % request.line).digest()[:-INDEX_BYTES]
        return [BlockHash(stem + index.to_bytes(INDEX_BYTES, "little")) for index in range(first, end)]
