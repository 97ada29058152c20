"""JSON files of a model directory, and the directory of the random model: configuration, tokenizer and chat template.

A token of the random model is a byte of UTF-8, and the eight tokens above them are special. Its "weights" are one
number, `checksum.seed`. Every complaint is a `ModelError`, one line, that names the file.
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


RANDOM_DIRECTORY = Path(__file__).parent / "random"
"""What needs no weights reads this one."""

SEED = "checksum.seed"
"""Name of the only tensor."""

WEIGHTS = "model.safetensors"


def write_random_directory(directory: Path, *, seed: int = 0) -> Path:
    """A copy with weights: all that FastDeploy and its worker read. The same seed gives the same bytes."""
    shutil.copytree(RANDOM_DIRECTORY, directory, dirs_exist_ok=True)
    write_seed(directory, seed)
    return directory


def write_seed(directory: Path, seed: int) -> None:
    """Other weights, at once."""
    from safetensors.numpy import save_file

    temporary = directory / f"{WEIGHTS}.tmp"
    save_file({SEED: np.array([seed], dtype=np.float32)}, temporary)
    temporary.replace(directory / WEIGHTS)


def read_seed(directory: Path) -> int:
    """Raises `ModelError` for a directory without."""
    from .weights import Checkpoint

    return int(Checkpoint(directory).read(SEED, (1,))[0])
