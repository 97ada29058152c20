"""One file of known size and checksum from the web, in as many attempts as the network needs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn

from tqdm import tqdm

from ..errors import ModelFetchError
from .web import TROUBLE, Web, why, without_password

CHUNK_BYTES = 1 << 18
PARTIAL_CONTENT = 206


@dataclass(frozen=True)
class KnownFile:
    """The only content that is accepted under this name."""

    name: str
    size: int
    """In bytes."""
    sha256: str


def download(file: KnownFile, find_url: Callable[[], str], web: Web, directory: Path) -> Path:
    """Path of the whole, verified file in `directory`; one that is there already is verified and not fetched.

    What an interrupted call got stays in `NAME.part`, and the next one goes on from there; one caller at a time.
    `find_url` is asked only when bytes are missing. Raises `ModelFetchError` for trouble with the network and for
    wrong content, which is deleted; `OSError` for trouble with the disk.
    """
    path, part = directory / file.name, directory / f"{file.name}.part"
    if not path.exists():
        if not part.exists() or part.stat().st_size < file.size:
            _complete(part, file, find_url(), web)
        part.replace(path)
    found = _sha256(path)
    if found != file.sha256:
        path.unlink()
        raise ModelFetchError(
            f"{file.name} arrived damaged (sha256 {found[:12]}..., not {file.sha256[:12]}...) and was deleted"
        )
    return path


def _complete(part: Path, file: KnownFile, url: str, web: Web) -> None:
    """Goes on after a broken connection as long as each one brings something."""
    with (
        part.open("ab") as target,
        tqdm(total=file.size, unit="B", unit_scale=True, desc=file.name, disable=None, leave=False) as bar,
    ):
        while (have := target.tell()) < file.size:
            trouble = _append_rest(target, file.size, url, web, bar)
            if target.tell() <= have:
                raise ModelFetchError(f"{without_password(url)}: {trouble}")


def _append_rest(target: BinaryIO, size: int, url: str, web: Web, bar: tqdm[NoReturn]) -> str:
    """Over one connection; returns why it ended. Only what goes wrong with `target` is raised."""
    try:
        with web.open(url, {"Range": f"bytes={target.tell()}-"}) as response:
            if response.status != PARTIAL_CONTENT:  # the server sends all of it
                target.truncate(0)
                target.seek(0)
            while target.tell() < size:
                chunk = response.read(min(CHUNK_BYTES, size - target.tell()))
                if not chunk:
                    break
                _write(target, chunk)
                bar.update(target.tell() - bar.n)
    except _DiskError as error:
        raise error.reason from None
    except TROUBLE as error:
        return why(error)
    return "the connection ended early"


class _DiskError(Exception):
    """Tells an error of the disk from one of the network: both are `OSError`."""

    def __init__(self, reason: OSError) -> None:
        super().__init__(reason)
        self.reason = reason


def _write(target: BinaryIO, chunk: bytes) -> None:
    try:
        target.write(chunk)
        target.flush()
    except OSError as error:
        raise _DiskError(error) from error


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as source:
        while chunk := source.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
