"""Which stored blocks the embedded server may use: those that it would compute bit by bit itself."""

from __future__ import annotations

import contextlib
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import xxhash

from .. import __version__
from ..errors import ModelError
from ..model import load_model_config
from ..model.hf_json import read_json
from ..scheduler.cache_utils import HASH_VERSION
from ..storage.namespace import Namespace
from .settings import ServerConfig

__all__ = ["storage_namespace"]

CHUNK = 16 << 20
VECTOR_UNITS = ("avx512f", "avx2", "avx", "asimd")
"""What decides the order in which the math library adds, so the last bits of a block."""


def storage_namespace(config: ServerConfig) -> Namespace:
    """Reads the whole model: another fine-tuning has the same shapes. Raises `ModelError`."""
    model = load_model_config(config.model_path)
    backend = model.cache_backend(block_size=config.cache.block_size, dtype=config.cache_dtype)
    return Namespace(
        model=f"{model}" if config.model_path is None else directory_digest(config.model_path),
        weight_epoch="0",
        layout=backend.layout,
        block_size=config.cache.block_size,
        tensor_parallel_size=1,
        implementation=f"embedded {__version__}, {_math_library()}, {_processor()}",
        hash_version=HASH_VERSION.decode(),
    )


def directory_digest(directory: Path) -> str:
    """Of the settings in a Hugging Face model directory, the index of its weights included, and of all its weights."""
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


def _weight_files(directory: Path) -> set[Path]:
    """With an index, those that it names count, whatever they are called."""
    named = {*directory.glob("*.safetensors")}
    index = directory / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if isinstance(weight_map, dict):  # else the worker refuses the model
            named |= {directory / Path(str(file)).name for file in weight_map.values()}
    return named


def _math_library() -> str:
    for name in ("paddlepaddle", "paddlepaddle-gpu"):
        with contextlib.suppress(PackageNotFoundError):
            return f"{name} {version(name)}, MKL_CBWR {os.environ.get('MKL_CBWR', '')!r}"
    return "paddle of unknown version"


def _processor() -> str:
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        flags = []
    unit = next((unit for unit in VECTOR_UNITS if unit in flags), "unknown")
    return f"{platform.machine()} {unit}"
