"""What decides the bytes of a block beside its layout: the model's weights and settings, and what computes."""

from __future__ import annotations

import contextlib
import json
import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import xxhash

from ..errors import ModelError

__all__ = ["model_digest", "paddle_version", "processor"]

CHUNK = 16 << 20
WEIGHTS = ("*.safetensors", "*.pdparams")
INDEX = "model.safetensors.index.json"
VECTOR_UNITS = ("avx512f", "avx2", "avx", "asimd")
"""What decides the order in which a CPU's math library adds, so the last bits of a block."""


def model_digest(directory: Path) -> str:
    """Of all weights in a model directory, the index of its weights included, and of its settings: 32 hexadecimal
    digits. Reads all of it: another fine-tuning has the same shapes. Raises `ModelError`.
    """
    digest = xxhash.xxh3_128()
    try:
        for path in sorted({*_weight_files(directory), *directory.glob("*.json")}):
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
            with path.open("rb") as file:
                while chunk := file.read(CHUNK):
                    digest.update(chunk)
    except OSError as error:
        raise ModelError(f"the model cannot be read again, for the name of its stored blocks: {error}") from None
    return digest.hexdigest()


def _weight_files(directory: Path) -> Iterable[Path]:
    """With an index, those that it names count, whatever they are called."""
    for pattern in WEIGHTS:
        yield from directory.glob(pattern)
    with contextlib.suppress(OSError, ValueError):  # without an index, or with one that no server can use
        index = json.loads((directory / INDEX).read_text())
        if isinstance(index, dict) and isinstance(weight_map := index.get("weight_map"), dict):
            yield from (directory / Path(str(file)).name for file in weight_map.values())


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
