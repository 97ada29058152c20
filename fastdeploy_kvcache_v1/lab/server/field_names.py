"""Names of request fields: which ones are known, and what happens to a request with another one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from itertools import islice
from typing import NamedTuple

from ...telemetry.metrics import counter, source
from .api_error import ApiError

logger = logging.getLogger(__name__)

IGNORED = frozenset({
    *("request_id", "trace_context", "collect_metrics", "max_streaming_response_tokens", "mm_hashes", "video_fps"),
    *("include_draft_logprobs", "include_logprobs_decode_token", "temp_scaled_logprobs", "top_p_normalized_logprobs"),
    *("metadata", "moderation", "parallel_tool_calls", "prediction", "prompt_cache_options"),
    *("prompt_cache_retention", "safety_identifier", "service_tier", "store", "tool_choice", "function_call"),
})  # fmt: skip
"""Fields of FastDeploy and of OpenAI's API that change no token here."""

NESTED: Mapping[str, Collection[str]] = {
    "stream_options": {"include_usage", "continuous_usage_stats", "include_obfuscation"},
    "messages": {
        *("role", "content", "name", "refusal", "annotations", "audio", "tool_calls", "function_call", "tool_call_id"),
        *("reasoning_content", "multimodal_content", "audio_content", "prompt_tokens", "completion_tokens"),
        *("prompt_token_ids", "completion_token_ids"),
    },
    "messages.content": {"type", "text", "image_url", "uuid", "prompt_cache_breakpoint"},
    "messages.content.image_url": {"url", "detail"},
}
"""Known fields of the objects in a request, by their path. Objects without a row hold names of the client's choice."""

MAX_FIELDS = 16
"""Unknown fields of one request that are looked at."""

MAX_NAMES = 100
"""Unknown names that the log gets, and that stay in memory."""

MAX_LENGTH = 64
"""Characters of a name."""


class UnknownField(NamedTuple):
    path: str
    """Of the object that holds it, "" for the request's body."""
    name: str
    """Cut to `MAX_LENGTH`."""
    known: Collection[str]
    """Fields of that object."""

    @property
    def full_name(self) -> str:
        """Without half surrogate pairs, which no answer can carry."""
        return f"{self.path}.{self.name}".removeprefix(".").encode(errors="replace").decode()

    def describe(self) -> str:
        """One line without control characters."""
        near = get_close_matches(self.name, self.known, 1)
        advice = f"did you mean {near[0]}?" if near else "docs/reference/request-fields.md lists the known ones"
        return f"unknown request field {self.full_name!r}: {advice}"


def unknown_fields(body: Mapping[str, object], known: Collection[str], path: str = "") -> Iterator[UnknownField]:
    """Fields with a value in the JSON object `body`, and in the objects that `NESTED` describes."""
    for name, value in body.items():
        inner = f"{path}.{name}" if path else name
        if value is None:
            continue
        if name not in known:
            yield UnknownField(path, name[:MAX_LENGTH], known)
        elif inner in NESTED:
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, dict):
                    yield from unknown_fields(each, NESTED[inner], inner)


@source("request fields")
class FieldCheck:
    """Counts unknown fields, and names each once in the log or refuses its request. Thread-safe."""

    unknown_fields: int = counter("Unknown fields in requests", "unknown_request_fields")

    def __init__(self, *, strict: bool) -> None:
        self.unknown_fields = 0
        self._strict = strict
        self._lock = threading.Lock()
        self._named: set[str] = set()

    def check(self, fields: Collection[UnknownField]) -> None:
        """Raises `ApiError` for the first of `fields` if the check is strict."""
        with self._lock:
            self.unknown_fields += len(fields)
            unseen = {each.full_name: each for each in fields if each.full_name not in self._named}
            fresh = {} if self._strict else dict(islice(unseen.items(), MAX_NAMES - len(self._named)))
            self._named.update(fresh)
            is_full = bool(fresh) and len(self._named) == MAX_NAMES
        if self._strict and fields:
            first = next(iter(fields))
            raise ApiError(400, first.describe(), first.full_name, "unknown_field")
        for field in fresh.values():
            logger.warning("ignored the %s", field.describe())
        if is_full:
            logger.warning("%d unknown request fields were named: later ones are only counted", MAX_NAMES)
