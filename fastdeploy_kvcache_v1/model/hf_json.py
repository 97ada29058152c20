"""Read the JSON files of a model directory; every complaint is a `ModelError` that names the file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ..errors import ModelError

MAX_FILE_MIB = 256
"""The largest file that is read whole; tokenizers have some 20 MiB."""

MAX_INTEGER = 2**31 - 1
"""No size of a model comes near it."""

MAX_SHOWN = 80
"""Characters of a value that a complaint quotes."""


def read_file(path: Path) -> bytes:
    """The content of a regular file of bounded size: not a pipe or device, which may never end. Raises `ModelError`."""
    try:
        if path.exists() and not path.is_file():
            raise ModelError(f"cannot read {path}: it is not a regular file")
        with path.open("rb") as file:
            content = file.read((MAX_FILE_MIB << 20) + 1)
    except FileNotFoundError:
        raise ModelError(f"{path.parent} is not a usable model directory: {path.name} is missing") from None
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if len(content) > MAX_FILE_MIB << 20:
        raise ModelError(f"cannot read {path}: it is larger than {MAX_FILE_MIB} MiB")
    return content


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`. Raises `ModelError` when it is missing, unreadable, or not a JSON object."""
    encoded = read_file(path)
    try:
        content = json.loads(encoded.decode("utf-8"))
    except ValueError as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    except RecursionError:
        raise ModelError(f"cannot read {path}: its JSON is nested too deeply") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return content


def read_optional_json(path: Path) -> dict[str, Any]:
    """Like `read_json`, but {} for a missing file."""
    return read_json(path) if path.exists() else {}


class Fields:
    """Typed access to one JSON object; a value of the wrong type or range is a `ModelError` naming file and field."""

    def __init__(self, source: str, values: dict[str, Any]) -> None:
        self.source = source
        self.values = values

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_INTEGER:
            raise ModelError(f"{self.source}: {name} must be an integer from 1 to {MAX_INTEGER}, got {_shown(value)}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise ModelError(f"{self.source}: {name} must be a positive number, got {_shown(value)}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise ModelError(f"{self.source}: {name} must be true or false, got {_shown(value)}")
        return value

    def section(self, name: str) -> dict[str, Any]:
        """A nested object, {} when absent or null."""
        value = self.values.get(name) or {}
        if not isinstance(value, dict):
            raise ModelError(f"{self.source}: {name} must be an object, got {_shown(value)}")
        return value

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"{self.source}: {name} is missing")
        return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
