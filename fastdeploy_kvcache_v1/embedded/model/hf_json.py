"""Read the JSON files of a model directory; every complaint is a `ModelError` that names the file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from ...errors import ModelError


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`. Raises `ModelError` when it is missing, unreadable, or not a JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path.parent} is not a usable model directory: {path.name} is missing") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
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

    def integer(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ModelError(f"{self.source}: {name} must be an integer of at least {least}, got {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ModelError(f"{self.source}: {name} must be a positive number, got {value!r}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise ModelError(f"{self.source}: {name} must be true or false, got {value!r}")
        return value

    def section(self, name: str) -> dict[str, Any]:
        """A nested object, {} when absent or null."""
        value = self.values.get(name) or {}
        if not isinstance(value, dict):
            raise ModelError(f"{self.source}: {name} must be an object, got {value!r}")
        return value

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"{self.source}: {name} is missing")
        return value
