"""JSON files of a model directory, and the directory of the random model: configuration, tokenizer and chat template.

A token of the random model is a byte of UTF-8, or one of eight special tokens above. Its only weight is the number
`checksum.seed`. Errors are a `ModelError` of one line that names the file.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from ...errors import ModelError

T = TypeVar("T")


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`, without null values, which mean a default. Raises `ModelError`."""
    if not path.is_file():
        raise ModelError(f"{path.parent} is not a usable model directory: {path.name} is missing or not a regular file")
    try:
        values = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise ModelError(f"cannot read {path}: {error}") from None
    return {name: value for name, value in values.items() if value is not None}


def converted(values: dict[str, Any], kind: type[T], source: Path) -> T:
    """The struct `kind` from `values` of the file `source`. Raises `ModelError`."""
    try:
        return msgspec.convert(values, type=kind)
    except msgspec.MsgspecError as error:
        raise ModelError(f"{source}: {error}") from None


RANDOM_DIRECTORY = Path(__file__).parent / "random"
"""Directory for readers that need no weights."""

SEED = "checksum.seed"

WEIGHTS = "model.safetensors"


def write_random_directory(directory: Path, *, seed: int = 0) -> Path:
    """Write a copy with weights, for FastDeploy and its worker. Equal seeds give equal bytes."""
    shutil.copytree(RANDOM_DIRECTORY, directory, dirs_exist_ok=True)
    write_seed(directory, seed)
    return directory


def write_seed(directory: Path, seed: int) -> None:
    """Replace the weights atomically."""
    from safetensors.numpy import save_file

    temporary = directory / f"{WEIGHTS}.tmp"
    save_file({SEED: np.array([seed], dtype=np.float32)}, temporary)
    temporary.replace(directory / WEIGHTS)


def read_seed(directory: Path) -> int:
    from .weights import Checkpoint

    return int(Checkpoint(directory).read(SEED, (1,))[0])
