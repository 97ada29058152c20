"""The tensor-parallel ranks of one model: what they tell each other while they compute a step.

A step is a sequence of rounds, the same on every rank. In each round every rank gives its part, or says that it failed,
and every rank gets the same answer: all parts in rank order, or the failure. So what one rank cannot do no rank does,
and a token is sampled on all ranks or on none.

Rank 0 collects the parts and sends out the answer, over one Unix socket per other rank: no two ranks ever write
to each other at the same time, and a rank that ended is noticed at once.
"""

from __future__ import annotations

import socket
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np

from ..errors import RankLostError, RanksDisagreeError, TransferError

__all__ = ["ONE_RANK", "PeerError", "PeerTransferError", "RankGroup", "Ranks", "join_ranks"]

DATA, COPY_FAILED, FAILED = range(3)
"""What a frame holds. Of two failures in one round, the greater number is told."""

_FRAME = struct.Struct("<QBQ")
"""Round, what it holds, bytes that follow."""

_LENGTH = struct.Struct("<Q")

CONNECT_RETRY_S = 0.02
INTRODUCTION_TIMEOUT_S = 10.0


class PeerTransferError(TransferError):
    """A copy failed on some rank; every rank gets this error."""


class PeerError(RuntimeError):
    """Computing failed on some rank; every rank gets this error."""


class Ranks(ABC):
    """One rank's view of its group. One thread uses it."""

    rank: int
    size: int

    @abstractmethod
    def exchange(self, part: bytes) -> list[bytes]:
        """The parts of all ranks, in rank order.

        Raises `PeerTransferError` or `PeerError` where a rank failed, `RankLostError` where one does not answer.
        """

    @abstractmethod
    def agree(self, result: bytes) -> None:
        """Every rank has come to this `result`. Raises as `exchange`, `RanksDisagreeError` if they differ."""

    @abstractmethod
    def union(self, numbers: Iterable[int]) -> set[int]:
        """What any rank gives. Raises as `exchange`."""

    @abstractmethod
    def fail(self, error: Exception) -> NoReturn:
        """This rank cannot take part in the next round, for this reason. Raises what every other rank gets, too."""


class _OneRank(Ranks):
    rank, size = 0, 1

    def exchange(self, part: bytes) -> list[bytes]:
        return [part]

    def agree(self, result: bytes) -> None:
        pass

    def union(self, numbers: Iterable[int]) -> set[int]:
        return set(numbers)

    def fail(self, error: Exception) -> NoReturn:
        raise error


ONE_RANK: Ranks = _OneRank()
"""A model that is not split."""


class RankGroup(Ranks):
    """Ranks in processes of one machine."""

    def __init__(
        self,
        rank: int,
        peers: Sequence[socket.socket],
        *,
        size: int,
        timeout_s: float | None,
        on_wait: Callable[[bool], None] = lambda waits: None,
    ) -> None:
        """`peers` of rank 0 are the sockets to ranks 1, 2, ...; of another rank the one to rank 0. They are its own.

        A rank that sends nothing for `timeout_s` counts as lost; None sets no limit. `on_wait` is told when this rank
        begins and ends to wait for others.
        """
        self.rank, self.size = rank, size
        self._peers = list(peers)
        self._on_wait = on_wait
        self._timeout_s = timeout_s
        self._round = 0
        for peer in self._peers:
            peer.settimeout(timeout_s)

    def exchange(self, part: bytes) -> list[bytes]:
        return [*map(bytes, self._exchange(DATA, part))]

    def agree(self, result: bytes) -> None:
        if len(set(map(bytes, self._exchange(DATA, result)))) > 1:
            raise RanksDisagreeError("the ranks computed different tokens for the same step (a bug)")

    def union(self, numbers: Iterable[int]) -> set[int]:
        own = np.fromiter(numbers, dtype=np.int64)
        return {int(number) for part in self._exchange(DATA, own.tobytes()) for number in np.frombuffer(part, np.int64)}

    def fail(self, error: Exception) -> NoReturn:
        kind = COPY_FAILED if isinstance(error, TransferError) else FAILED
        self._exchange(kind, (str(error) if kind == COPY_FAILED else repr(error)).encode())
        raise AssertionError("a round with a failed rank gives no parts")

    def close(self) -> None:
        """Idempotent."""
        for peer in self._peers:
            peer.close()

    def _exchange(self, kind: int, part: bytes | memoryview) -> list[memoryview]:
        """One round. The parts of all ranks; raises where one of them is a failure."""
        self._on_wait(True)
        try:
            if self.rank == 0:
                kind, answer = self._collect(kind, part)
            else:
                self._send(self._peers[0], 0, kind, part)
                kind, answer = self._receive(self._peers[0], 0)
        finally:
            self._on_wait(False)
        self._round += 1
        if kind != DATA:
            raise (PeerTransferError if kind == COPY_FAILED else PeerError)(bytes(answer).decode())
        return _unpack(answer)

    def _collect(self, kind: int, part: bytes | memoryview) -> tuple[int, memoryview]:
        frames = [(kind, memoryview(part))]
        frames += [self._receive(peer, rank) for rank, peer in enumerate(self._peers, 1)]
        worst = max(kind for kind, _ in frames)
        if worst == DATA:
            answer = _pack([part for _, part in frames])
        else:
            rank = next(rank for rank, (kind, _) in enumerate(frames) if kind == worst)
            answer = f"rank {rank}: ".encode() + frames[rank][1]
        for rank, peer in enumerate(self._peers, 1):
            self._send(peer, rank, worst, answer)
        return worst, memoryview(answer)

    def _send(self, peer: socket.socket, rank: int, kind: int, content: bytes | memoryview) -> None:
        try:
            peer.sendall(_FRAME.pack(self._round, kind, len(content)))
            peer.sendall(content)
        except OSError as error:
            raise self._lost(rank, error) from None

    def _receive(self, peer: socket.socket, rank: int) -> tuple[int, memoryview]:
        try:
            number, kind, length = _FRAME.unpack(_read(peer, _FRAME.size))
            content = _read(peer, length)
        except OSError as error:
            raise self._lost(rank, error) from None
        if number != self._round:
            raise RanksDisagreeError(f"rank {rank} is in round {number}, rank {self.rank} in {self._round} (a bug)")
        return kind, content

    def _lost(self, rank: int, error: OSError) -> RankLostError:
        if isinstance(error, TimeoutError):
            return RankLostError(f"rank {rank} of {self.size} sent nothing for {self._timeout_s:g} s")
        return RankLostError(f"rank {rank} of {self.size} has ended")


def join_ranks(
    path: Path,
    rank: int,
    size: int,
    *,
    connect_timeout_s: float,
    timeout_s: float | None,
    on_wait: Callable[[bool], None] = lambda waits: None,
) -> Ranks:
    """Meet the other ranks at the Unix socket `path`, in a directory that only this user can enter; rank 0 makes it.

    `ONE_RANK` for a group of one. Raises `RankLostError` for ranks that do not come within `connect_timeout_s`.
    """
    if size == 1:
        return ONE_RANK
    deadline = time.monotonic() + connect_timeout_s
    peers = _accept(path, size, deadline) if rank == 0 else [_connect(path, rank, size, deadline)]
    return RankGroup(rank, peers, size=size, timeout_s=timeout_s, on_wait=on_wait)


def _accept(path: Path, size: int, deadline: float) -> list[socket.socket]:
    peers: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        path.unlink(missing_ok=True)  # of a group before
        listener.bind(str(path))
        listener.listen(size)
        try:
            while len(peers) < size - 1:
                listener.settimeout(max(deadline - time.monotonic(), 0.001))
                rank, peer = _introduced(listener.accept()[0])
                peers[rank] = peer
        except OSError:
            for peer in peers.values():
                peer.close()
            missing = min(set(range(1, size)) - set(peers))
            raise RankLostError(f"rank {missing} of {size} did not come up") from None
        finally:
            path.unlink(missing_ok=True)
    return [peers[rank] for rank in range(1, size)]


def _introduced(peer: socket.socket) -> tuple[int, socket.socket]:
    """With the rank that it says it is. Raises `OSError`."""
    try:
        peer.settimeout(INTRODUCTION_TIMEOUT_S)
        return _LENGTH.unpack(_read(peer, _LENGTH.size))[0], peer
    except OSError:
        peer.close()
        raise


def _connect(path: Path, rank: int, size: int, deadline: float) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    while True:
        try:
            peer.connect(str(path))
            peer.sendall(_LENGTH.pack(rank))
            return peer
        except OSError:
            if time.monotonic() > deadline:
                peer.close()
                raise RankLostError(f"rank 0 of {size} did not come up") from None
            time.sleep(CONNECT_RETRY_S)


def _read(peer: socket.socket, length: int) -> memoryview:
    """Raises `OSError`, also at the end of the stream."""
    content = memoryview(bytearray(length))
    done = 0
    while done < length:
        count = peer.recv_into(content[done:])
        if not count:
            raise ConnectionResetError("the other end is closed")
        done += count
    return content


def _pack(parts: Sequence[memoryview]) -> bytes:
    return b"".join(each for part in parts for each in (_LENGTH.pack(len(part)), part))


def _unpack(answer: memoryview) -> list[memoryview]:
    parts, at = [], 0
    while at < len(answer):
        (length,) = _LENGTH.unpack_from(answer, at)
        at += _LENGTH.size
        parts.append(answer[at : at + length])
        at += length
    return parts
