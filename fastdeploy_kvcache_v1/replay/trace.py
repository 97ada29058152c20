"""Request traces in Mooncake's JSONL format, and block hashes for them.

One line per request: `{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}`, where
each hash id stands for 512 prompt tokens (the last one for the rest) together with everything before them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ConfigError, TraceError
from ..metadata import BlockHash

TOKENS_PER_ID = 512
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


def read_trace(path: Path, limit: int | None = None) -> Iterator[TraceRequest]:
    """The first `limit` requests of `path` (all by default), read as they are asked for.

    Raises `TraceError` naming the file, and the line for a broken one; a trace without requests is broken too.
    """
    count = 0
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(iter(lambda: file.readline((MAX_LINE_MIB << 20) + 1), b""), start=1):
                if count == limit:
                    return
                if len(line) > MAX_LINE_MIB << 20:
                    raise TraceError(f"{path}:{number}: the line is longer than {MAX_LINE_MIB} MiB")
                if line.strip():
                    yield _parse(path, number, line)
                    count += 1
    except OSError as error:
        raise TraceError(f"cannot read trace {path}: {error.strerror}") from error
    if not count:
        raise TraceError(f"trace {path} holds no requests")


def _parse(path: Path, number: int, line: bytes) -> TraceRequest:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}:{number}: not a JSON object: {error}") from error
    if not isinstance(fields, dict):
        raise TraceError(f"{path}:{number}: not a JSON object")
    timestamp = fields.get("timestamp", 0)
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float) or not 0 <= timestamp < float("inf"):
        raise TraceError(f"{path}:{number}: timestamp must be a number of milliseconds, got {_shown(timestamp)}")
    request = TraceRequest(
        line=number,
        timestamp_ms=timestamp,
        input_length=_integer(path, number, fields, "input_length", least=1),
        output_length=_integer(path, number, fields, "output_length", least=0),
        hash_ids=_hash_ids(path, number, fields.get("hash_ids")),
    )
    expected = -(-request.input_length // TOKENS_PER_ID)
    if len(request.hash_ids) != expected:
        raise TraceError(
            f"{path}:{number}: {request.input_length} input tokens need {expected} hash ids of {TOKENS_PER_ID} tokens, "
            f"got {len(request.hash_ids)}"
        )
    return request


def _integer(path: Path, number: int, fields: dict[str, Any], name: str, *, least: int) -> int:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_LENGTH:
        wanted = f"an integer from {least} to {MAX_LENGTH}"
        raise TraceError(f"{path}:{number}: {name} must be {wanted}, got {_shown(value)}")
    return value


def _hash_ids(path: Path, number: int, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise TraceError(f"{path}:{number}: hash_ids must be a list of integers, got {type(value).__name__}")
    for item in value:
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < 2**64:
            raise TraceError(f"{path}:{number}: hash ids must be integers in 0..2**64-1, got {_shown(item)}")
    return tuple(value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


class TraceHasher:
    """Turns the 512-token ids of a trace into hashes of `block_size`-token blocks. Not thread-safe.

    An id names 512 tokens *and* everything before them, so in a well-formed trace it always has the same parent id.
    Where one does not (the format does not forbid it), it means the same tokens after another prefix, which is another
    block: the digest is chained over the parent's, so the two never match each other. `num_reparented_ids` counts them.

    One SHA-256 per id; its blocks share the digest and differ in an index. Equal hashes mean an equal prefix, as with
    `cache_utils.BlockHasher`. Raises `ConfigError` unless `block_size` divides 512.
    """

    def __init__(self, block_size: int) -> None:
        if block_size < 1 or TOKENS_PER_ID % block_size:
            raise ConfigError(f"block size {block_size} must divide the trace's {TOKENS_PER_ID}-token blocks")
        self.num_reparented_ids = 0
        self._block_size = block_size
        self._indices = [index.to_bytes(INDEX_BYTES, "little") for index in range(TOKENS_PER_ID // block_size)]
        self._parents: dict[int, int] = {}

    def prompt_hashes(self, request: TraceRequest) -> list[BlockHash]:
        """One hash per full block of the prompt, in prompt order."""
        hashes: list[BlockHash] = []
        digest = bytes(DIGEST_BYTES)
        parent = -1
        for hash_id in request.hash_ids:
            self.num_reparented_ids += self._parents.setdefault(hash_id, parent) != parent
            digest = sha256(digest + hash_id.to_bytes(8, "little")).digest()
            stem = digest[:-INDEX_BYTES]
            hashes.extend([BlockHash(stem + index) for index in self._indices])
            parent = hash_id
        del hashes[request.input_length // self._block_size :]
        return hashes

    def output_hashes(self, request: TraceRequest) -> list[BlockHash]:
        """Hashes of the full blocks after `prompt_hashes`: generated tokens, which a trace does not name.

        They are unique to the request: a later turn of the same conversation does not hit them.
        """
        first = request.input_length // self._block_size
        end = (request.input_length + request.output_length) // self._block_size
        stem = sha256(b"output of trace line %d" % request.line).digest()[:-INDEX_BYTES]
        return [BlockHash(stem + index.to_bytes(INDEX_BYTES, "little")) for index in range(first, end)]
