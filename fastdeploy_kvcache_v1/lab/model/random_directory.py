"""The directory of the random model, for both servers: configuration, tokenizer and chat template.

A token is a byte of UTF-8, and the eight tokens above them are special. Its "weights" are one number, `checksum.seed`.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

__all__ = ["RANDOM_DIRECTORY", "read_seed", "write_random_directory", "write_seed"]

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
