"""Read the JSON files of a model directory; every complaint is a `ModelError`, one line, that names the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ...errors import ModelError

T = TypeVar("T")


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`, without what is null: a default, in these files. Raises `ModelError`."""
    if not path.is_file():
        raise ModelError(f"{path.parent} is not a usable model directory: {path.name} is missing or not a regular file")
    try:
        values = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise ModelError(f"cannot read {path}: {error}") from None
    return {name: value for name, value in values.items() if value is not None}


def converted(values: dict[str, Any], kind: type[T], source: Path) -> T:
    """The fields of the struct `kind` out of `values` of the file `source`. Raises `ModelError` for a wrong one."""
    try:
        return msgspec.convert(values, type=kind)
    except msgspec.MsgspecError as error:
        raise ModelError(f"{source}: {error}") from None
