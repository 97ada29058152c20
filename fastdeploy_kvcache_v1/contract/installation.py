"""What an installation has and lacks: packages by extra, system libraries, and `Finding`, a line of doctor's report."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from ..errors import ConfigError

__all__ = ["Finding", "missing_libraries", "needed_by"]

# fmt: off
MODULES = {
    "": ("msgspec", "numpy", "psutil", "pyroaring", "tomli", "tqdm", "wrapt"),
    "embedded": (
        "PIL", "anyio", "fastapi", "filelock", "gguf", "httpx2", "paddle", "prometheus_client", "pydantic",
        "safetensors", "starlette", "tokenizers", "transformers", "uvicorn", "xxhash", "yaml", "zmq",
    ),
    "demo": ("rich",),
    "gpu": ("cupy",),
}
# fmt: on
"""Modules of other projects that this package imports, FastDeploy apart, by the extra that installs them."""

DEPENDENCIES = {name for modules in MODULES.values() for name in modules}


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


def missing_libraries(libraries: Mapping[str, str]) -> str:
    """Libraries of the system that cannot be loaded, and the command that installs them; empty where none is missing.

    `libraries` have Debian's names of their packages.
    """
    lost = {}
    for name, package in libraries.items():
        try:
            ctypes.CDLL(name)
        except OSError:
            lost[name] = package
    return f"{', '.join(lost)}, missing here: apt-get install {' '.join(lost.values())}" if lost else ""


class Finding(NamedTuple):
    """One line of doctor's report. A detail that is not ok says what was found, what was expected, and what to do."""

    ok: bool | None
    """None for information that decides nothing."""
    name: str
    detail: str

    def __str__(self) -> str:
        mark = {True: "ok", False: "FAIL", None: "-"}[self.ok]
        return f"{mark:>4}  {self.name}: {self.detail}"
