"""What a worker rank tells the engine about its copies: the message, its codec, and where the socket is.

The message is JSON: nothing that arrives is unpickled. It carries totals since the start of the worker, so what a lost
message said is in the next one.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import astuple, dataclass
from pathlib import Path

from ..contract.copy_totals import CopyTotals, RankCopies
from ..contract.messages import CacheLevel, CopyPath, PassProgress, TransferResult
from ..contract.timings import PrefillTime
from ..errors import MessageVersionError
from ..forks import SOCKET_DIRECTORIES

VERSION = 6
"""Counts the changes of the message."""

MAX_SOCKET_PATH = 107
"""Bytes of the longest path that a unix socket can have."""

LONGEST_NAME = "storage-01234567-9999"
"""Of a socket in the engine's directory."""


@dataclass(frozen=True)
class CopyReport:
    """What one worker process says after a step in which copies ended."""

    rank: int
    """Tensor parallel rank."""
    worker: str
    """Names the process: a worker that starts again counts from 0 again, under another name."""
    number: int
    """Counts the reports of the process from 0, those that it could not send included."""
    copies: RankCopies
    """Totals since the start of the process."""
    failed: tuple[TransferResult, ...] = ()
    """Copies that failed since the last report that was sent."""
    ended_through: int = -1
    """See `TransferReport.ended_through`."""
    unlisted_through: int = -1
    """Copies of this step and earlier ones may have failed without being in any report: there were too many."""
    passes: PassProgress | None = None
    """The latest news of forward passes; None where nobody asks for them."""
    prefills: tuple[PrefillTime, ...] = ()
    """Passes that were measured since the last report that was sent."""
    paths: tuple[CopyPath, ...] = ()
    """The ways in which the worker copies, and those that it does without."""

    def dumps(self) -> bytes:
        copies = self.copies
        failed = [
            (each.step, each.source.value, each.target.value, each.num_blocks, each.target_slots, each.error)
            for each in self.failed
        ]
        totals = astuple(copies.swap_in), astuple(copies.swap_out), copies.exposed_wait_s
        steps = self.ended_through, self.unlisted_through, self.passes
        content = (VERSION, self.rank, self.worker, self.number, *totals, failed, *steps, self.prefills, self.paths)
        return json.dumps(content).encode()

    @classmethod
    def loads(cls, message: bytes) -> CopyReport:
        """Raises `MessageVersionError` for another version, `ValueError` for what is no report at all."""
        content = json.loads(message)
        version = content[0] if isinstance(content, list) and content else content
        if version != VERSION:
            raise MessageVersionError("copy report", found=version, expected=VERSION)
        try:
            _, rank, worker, number, swap_in, swap_out, waited, failed, ended, unlisted, passed, prefills, paths = (
                content
            )
            copies = RankCopies(CopyTotals(*swap_in), CopyTotals(*swap_out), float(waited))
            failures = tuple(_failure(*each) for each in failed)
            passes = None if passed is None else _passes(*passed)
            steps = int(ended), int(unlisted), passes
            measured = tuple(_prefill(*each) for each in prefills)
            return cls(int(rank), str(worker), int(number), copies, failures, *steps, measured, _paths(paths))
        except TypeError as error:
            raise ValueError(f"a copy report has fields of the wrong kind: {error}") from None


def _failure(step: int, source: str, target: str, num_blocks: int, slots: list[int], error: str) -> TransferResult:
    tiers = CacheLevel(source), CacheLevel(target)
    return TransferResult(int(step), *tiers, int(num_blocks), 0, 0.0, tuple(map(int, slots)), str(error))


def _passes(step: int, at: float, is_idle: bool) -> PassProgress:
    return PassProgress(int(step), float(at), bool(is_idle))


def _paths(paths: list[list[str]]) -> tuple[CopyPath, ...]:
    return tuple(CopyPath(*map(str, each)) for each in paths)


def _prefill(num_tokens: int, num_positions: float, seconds: float) -> PrefillTime:
    return PrefillTime(int(num_tokens), float(num_positions), float(seconds))


def socket_path(queue_port: int, name: str = "copies") -> Path:
    """Socket `name` of the engine that serves the worker queue at `queue_port`, which engine and workers both know.

    No two engines of one machine share a port, data parallel ones of one server included. The directory is its own.
    """
    directory, own = Path(tempfile.gettempdir()), f"{SOCKET_DIRECTORIES}{os.getuid()}-{queue_port}"
    if len(os.fsencode(directory / own / LONGEST_NAME)) > MAX_SOCKET_PATH:
        directory = Path("/tmp")
    return directory / own / name
