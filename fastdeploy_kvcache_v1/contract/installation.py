"""The installation: packages by extra, system libraries, and `Finding`, a line of doctor's report on them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from ..errors import ConfigError

__all__ = ["Finding", "missing_libraries", "needed_by"]

# fmt: off
MODULES = {
    "": ("msgspec", "numpy", "prometheus_client", "psutil", "pyroaring", "tomli", "tqdm", "wrapt"),
    "embedded": (
        "PIL", "anyio", "fastapi", "filelock", "gguf", "httpx2", "paddle", "pydantic",
        "safetensors", "starlette", "tokenizers", "transformers", "uvicorn", "xxhash", "yaml",
    ),
    "demo": ("rich",),
    "gpu": ("cupy",),
}
# fmt: on
"""Third-party modules that this package imports, except FastDeploy, by the extra that installs them."""

DEPENDENCIES = {name for modules in MODULES.values() for name in modules}


@contextmanager
def needed_by(what: str, extras: str = "") -> Iterator[None]:
    """Wrap imports that need the comma-separated `extras`.

    Raises `ConfigError` with the install command if a dependency is missing. Any other missing module is a bug and
    stays a `ModuleNotFoundError`.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in DEPENDENCIES:
            raise
        package = f"'fastdeploy-kvcache-v1[{extras}]'" if extras else "fastdeploy-kvcache-v1"
        raise ConfigError(f"{what} needs the package {error.name}: pip install {package}") from None


def missing_libraries(libraries: Mapping[str, str]) -> str:
    """Name the system libraries that cannot be loaded and the command that installs them; empty if none is missing.

    `libraries` maps each name to its Debian package.
    """
    missing = {}
    for name, package in libraries.items():
        try:
            ctypes.CDLL(name)
        except OSError:
            missing[name] = package
    return f"{', '.join(missing)}, missing here: apt-get install {' '.join(missing.values())}" if missing else ""


class Finding(NamedTuple):
    """A line of doctor's report. A `detail` that is not ok says got, expected, do."""

    ok: bool | None
    """None for information that decides nothing."""
    name: str
    detail: str

    def __str__(self) -> str:
        mark = {True: "ok", False: "FAIL", None: "-"}[self.ok]
        return f"{mark:>4}  {self.name}: {self.detail}"
