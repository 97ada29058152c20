"""CopyReport: a worker rank's message to the engine about its copies.

The message is JSON, so nothing is unpickled. Its totals count from the start of the worker, which makes up for a lost
message.
"""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from ..contract.messages import WorkerReport
from ..errors import MessageVersionError


class CopyReport(msgspec.Struct, frozen=True):
    """Report of one worker process after a step in which copies ended."""

    rank: int
    """Tensor parallel rank."""
    worker: str
    """Name of the process. A restarted worker has another name and counts from 0."""
    number: int
    """Reports of the process before this one, with those that it could not send."""
    news: WorkerReport
    """Since the last report that was sent. It lists failed copies only; totals are of the process."""
    unlisted_through: int = -1
    """Failures of this step and earlier ones may be missing from all reports: there were too many."""

    def dumps(self) -> bytes:
        return msgspec.json.encode((SHAPE, self))

    @classmethod
    def loads(cls, message: bytes) -> CopyReport:
        """Raises `MessageVersionError` for another `SHAPE`, `ValueError` for a malformed message."""
        try:
            shape, report = msgspec.json.decode(message, type=tuple[str, msgspec.Raw])
            if shape != SHAPE:
                raise MessageVersionError("copy report", found=shape, expected=SHAPE)
            return msgspec.json.decode(report, type=cls)
        except msgspec.MsgspecError as error:
            raise ValueError(str(error)) from None


def shape_of(message: type) -> str:
    """Digest of the fields of a message, their types and docs: versions that differ in one refuse each other."""
    return blake2b(msgspec.json.encode(msgspec.json.schema(message)), digest_size=8).hexdigest()


SHAPE = shape_of(CopyReport)
