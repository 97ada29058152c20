"""What decides the bytes of a block beside its layout: the model's weights and settings, and what computes."""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Collection, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import xxhash

from ..errors import ModelError

__all__ = ["model_digest", "numeric_variables", "paddle_version", "processor"]

CHUNK = 16 << 20
WEIGHTS = ("*.safetensors", "*.pdparams")
SETTINGS = "*.json"
INDEX = "model.safetensors.index.json"
VECTOR_UNITS = ("avx512f", "avx2", "avx", "asimd")
"""What decides the order in which a CPU's math library adds, so the last bits of a block."""
NUMERIC_VARIABLES = (
    "FLAGS_",
    "MKL_CBWR",
    "DNNL_",
    "ONEDNN_",
    "CUBLAS",
    "CUDNN_",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NVIDIA_TF32_",
)
"""Paddle's own, and those of the libraries that it computes with: how their names begin."""


def model_digest(directory: Path) -> str:
    """Of all weights in a model directory, the index of its weights included, and of its settings: 32 hexadecimal
    digits. Reads all of it: another fine-tuning has the same shapes. Raises `ModelError`, also without any weights.
    """
    digest = xxhash.xxh3_128()
    try:
        weights = {*_weight_files(directory)}
        if not weights:
            raise ModelError(f"the stored blocks of {directory} have no name: it holds no {' or '.join(WEIGHTS)}")
        for path in sorted({*weights, *_everywhere(directory, SETTINGS)}):
            digest.update(f"{path.relative_to(directory)} {path.stat().st_size}\n".encode())
            with path.open("rb") as file:
                while chunk := file.read(CHUNK):
                    digest.update(chunk)
    except OSError as error:
        raise ModelError(f"the model cannot be read again, for the name of its stored blocks: {error}") from None
    return digest.hexdigest()


def _weight_files(directory: Path) -> Iterable[Path]:
    """With an index, those that it names count, whatever they are called."""
    for pattern in WEIGHTS:
        yield from _everywhere(directory, pattern)
    with contextlib.suppress(OSError, ValueError):  # without an index, or with one that no server can use
        index = json.loads((directory / INDEX).read_text())
        if isinstance(index, dict) and isinstance(weight_map := index.get("weight_map"), dict):
            yield from (directory / Path(str(file)).name for file in weight_map.values())


def _everywhere(directory: Path, pattern: str) -> Iterable[Path]:
    """Also in the parts that FastDeploy reads for each tensor parallel rank."""
    yield from directory.glob(pattern)
    yield from directory.glob(f"rank*/{pattern}")


def paddle_version() -> str:
    """Of whichever build is installed."""
    for name in ("paddlepaddle", "paddlepaddle-gpu"):
        with contextlib.suppress(PackageNotFoundError):
            return f"{name} {version(name)}"
    return "paddle of unknown version"


def processor() -> str:
    """Architecture and vector unit of this machine's processor."""
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        flags = []
    unit = next((unit for unit in VECTOR_UNITS if unit in flags), "unknown")
    return f"{platform.machine()} {unit}"


def numeric_variables(
    more_prefixes: tuple[str, ...] = (), *, more: Collection[str] = (), without: Collection[str] = ()
) -> list[str]:
    """`NAME=value` of each environment variable that may decide the bytes of a block, in order: all that begin as
    `NUMERIC_VARIABLES` or `more_prefixes` say, and `more`, but not those in `without`.
    """
    prefixes = NUMERIC_VARIABLES + more_prefixes
    names = (name for name in os.environ if name.startswith(prefixes) or name in more)
    return sorted(f"{name}={os.environ[name]}" for name in names if name not in without)
