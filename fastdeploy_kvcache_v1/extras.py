"""The packages that extras install, and the one line for a user who lacks one of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .errors import ConfigError

__all__ = ["needed_by"]

DEPENDENCIES = {
    "PIL",
    "anyio",
    "cupy",
    "fastapi",
    "filelock",
    "gguf",
    "httpx",
    "matplotlib",
    "msgspec",
    "numpy",
    "paddle",
    "prometheus_client",
    "psutil",
    "pydantic",
    "pyroaring",
    "rich",
    "safetensors",
    "starlette",
    "tokenizers",
    "tomli",
    "tqdm",
    "transformers",
    "uvicorn",
    "wrapt",
    "xxhash",
    "zmq",
}
"""Modules of other projects that this package imports, FastDeploy apart."""


@contextmanager
def needed_by(what: str, extras: str = "") -> Iterator[None]:
    """`extras`, separated by commas, install what the block imports beside the package's own dependencies.

    Raises `ConfigError` with the command for it where a dependency is missing. Any other module that is not found is a
    bug, and stays a `ModuleNotFoundError`.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in DEPENDENCIES:
            raise
        package = f"'fastdeploy-kvcache-v1[{extras}]'" if extras else "fastdeploy-kvcache-v1"
        raise ConfigError(f"{what} needs the package {error.name}: pip install {package}") from None
