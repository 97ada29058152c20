"""Refusals in the form of OpenAI's API. Needs no HTTP library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine.generation import Failure

TYPES = {404: "not_found_error", 409: "conflict_error", 500: "internal_error"}
"""Other statuses from 500 on are "service_unavailable_error", which clients retry."""

MAX_MESSAGE = 1000
"""Characters."""


class ApiError(Exception):
    """A refusal; becomes an HTTP status and a body in OpenAI's form."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = error_body(status, message, param, code)

    @classmethod
    def of(cls, failure: Failure) -> ApiError:
        return cls(failure.status, failure.message)


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """`{"error": {...}}` with a message of one line, cut to `MAX_MESSAGE`."""
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "service_unavailable_error")
    # A template's message can carry half of a surrogate pair, which an answer cannot.
    line = " ".join(message.encode("utf-8", errors="replace").decode().split())
    line = line if len(line) <= MAX_MESSAGE else f"{line[:MAX_MESSAGE]}..."
    return {"error": {"message": line, "type": kind, "param": param, "code": code}}


def describe_validation(errors: Sequence[Any]) -> tuple[str, str | None]:
    """One line and the field's name for pydantic's first finding."""
    first = errors[0]
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        return f"the request body is not valid JSON: {first.get('ctx', {}).get('error', message)}", None
    path = [str(part) for part in first["loc"] if part != "body"]
    if not path:
        is_ours = first["type"] == "value_error"
        return (message if is_ours else "the request body must be a JSON object, declared as application/json"), None
    param = ".".join(path)
    return (message if message.startswith(f"{param} ") else f"{param}: {message}"), param
