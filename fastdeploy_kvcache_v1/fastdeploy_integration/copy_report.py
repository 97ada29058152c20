"""What a worker rank tells the engine about its copies: the message, its codec, and where the socket is.

The message is JSON: nothing that arrives is unpickled. It carries totals since the start of the worker, so what a lost
message said is in the next one.
"""

from __future__ import annotations

import os
import tempfile
from hashlib import blake2b
from pathlib import Path

import msgspec

from ..contract.messages import WorkerReport
from ..errors import MessageVersionError
from ..forks import SOCKET_DIRECTORIES

MAX_SOCKET_PATH = 107
"""Bytes of the longest path that a unix socket can have."""

LONGEST_NAME = "storage-01234567-9999"
"""Of a socket in the engine's directory."""


class CopyReport(msgspec.Struct, frozen=True):
    """What one worker process says after a step in which copies ended."""

    rank: int
    """Tensor parallel rank."""
    worker: str
    """Names the process: a worker that starts again counts from 0 again, under another name."""
    number: int
    """Counts the reports of the process from 0, those that it could not send included."""
    news: WorkerReport
    """Since the last report that was sent; of copies, those that failed. Its totals are of the process."""
    unlisted_through: int = -1
    """Copies of this step and earlier ones may have failed without being in any report: there were too many."""

    def dumps(self) -> bytes:
        return msgspec.json.encode((SHAPE, self))

    @classmethod
    def loads(cls, message: bytes) -> CopyReport:
        """Raises `MessageVersionError` for another `SHAPE`, `ValueError` for what is no report at all."""
        try:
            shape, report = msgspec.json.decode(message, type=tuple[str, msgspec.Raw])
            if shape != SHAPE:
                raise MessageVersionError("copy report", found=shape, expected=SHAPE)
            return msgspec.json.decode(report, type=cls)
        except msgspec.MsgspecError as error:
            raise ValueError(str(error)) from None


def shape_of(message: type) -> str:
    """Digest of all fields of a message, their types and their docs: versions that differ in one refuse each other."""
    return blake2b(msgspec.json.encode(msgspec.json.schema(message)), digest_size=8).hexdigest()


SHAPE = shape_of(CopyReport)


def socket_path(queue_port: int, name: str = "copies") -> Path:
    """Socket `name` of the engine that serves the worker queue at `queue_port`, which engine and workers both know.

    No two engines of one machine share a port, data parallel ones of one server included. The directory is its own.
    """
    directory, own = Path(tempfile.gettempdir()), f"{SOCKET_DIRECTORIES}{os.getuid()}-{queue_port}"
    if len(os.fsencode(directory / own / LONGEST_NAME)) > MAX_SOCKET_PATH:
        directory = Path("/tmp")
    return directory / own / name
