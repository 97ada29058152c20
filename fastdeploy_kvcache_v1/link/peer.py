"""Peer: a connected socket as whole messages. A frame is 4 bytes of length and a body, see `messages`."""

from __future__ import annotations

import contextlib
import os
import socket
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from io import FileIO
from struct import Struct
from typing import Any

from ..forks import closed_in_children, opening
from .messages import Decoders, Memory, decode, with_file

LENGTH = Struct("<I")
MAX_FRAME_BYTES = 1 << 24
MAX_UNSENT_BYTES = 1 << 26
MAX_UNSENT_FRAMES = 10_000
READ_BYTES = 1 << 16
MAX_FILES = 2
"""Descriptors that arrive in one read: the kernel ends a read behind each message that brings some."""


def unix_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)


def inherited_socket(descriptor: int) -> socket.socket:
    return socket.socket(fileno=descriptor)


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of one connection, closed in forked children. Call while `opening`."""
    one, other = map(closed_in_children, socket.socketpair())
    return one, other


class Outbox:
    """Frames that wait for room in a socket. Not thread-safe."""

    def __init__(self) -> None:
        self._frames: deque[tuple[memoryview, FileIO | None]] = deque()
        self._unsent_bytes = 0
        self.is_overfull = False
        """True: the other end did not read, and a frame was dropped. The connection must end."""

    def __bool__(self) -> bool:
        """True: something waits."""
        return bool(self._frames)

    def put(self, body: bytes, descriptor: int | None = None) -> None:
        """`descriptor` stays the caller's."""
        self.is_overfull |= self._unsent_bytes > MAX_UNSENT_BYTES or len(self._frames) >= MAX_UNSENT_FRAMES
        if self.is_overfull:
            return
        with opening:
            file = None if descriptor is None else closed_in_children(FileIO(os.dup(descriptor)))
        frame = memoryview(LENGTH.pack(len(body)) + body)
        self._frames.append((frame, file))
        self._unsent_bytes += len(frame)

    def flush(self, connection: socket.socket) -> None:
        """Send what there is room for. Nothing waits afterwards if the other end is gone: a read will tell."""
        while self._frames:
            frame, file = self._frames.popleft()
            try:
                sent = socket.send_fds(connection, [frame], [] if file is None else [file.fileno()])
            except BlockingIOError:
                self._frames.appendleft((frame, file))
                return
            except OSError:
                self._frames.appendleft((frame, file))
                self.clear()
                return
            if file is not None:
                file.close()
            self._unsent_bytes -= sent
            if sent < len(frame):
                self._frames.appendleft((frame[sent:], None))

    def clear(self) -> None:
        for _, file in self._frames:
            if file is not None:
                file.close()
        self._frames.clear()
        self._unsent_bytes = 0


class Peer:
    """One thread reads. Sending is for one thread at a time. Closed in forked children."""

    def __init__(self, connect: Callable[[], socket.socket], decoders: Decoders) -> None:
        """Raises what `connect` raises."""
        with opening:
            self.socket = closed_in_children(connect())
        self.socket.setblocking(False)
        self.outbox = Outbox()
        self._decoders = decoders
        self._arrived = bytearray()
        self._files: deque[FileIO] = deque()

    def flush(self) -> None:
        self.outbox.flush(self.socket)

    def receive(self) -> None:
        """Take what has arrived. Raises `EOFError` at the end, `ValueError` for descriptors without a message."""
        try:
            # As socket.recv_fds, which drops the flag in some versions of Python: children would inherit them.
            room = socket.CMSG_LEN(MAX_FILES * array("i").itemsize)
            with opening:
                data, parts, flags, _ = self.socket.recvmsg(READ_BYTES, room, socket.MSG_CMSG_CLOEXEC)
                for level, kind, descriptors in parts:
                    if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                        self._files.extend(closed_in_children(FileIO(each)) for each in array("i", descriptors))
        except BlockingIOError:
            return
        except OSError:
            raise EOFError from None
        if flags & socket.MSG_CTRUNC:
            raise ValueError("a descriptor was lost: this process may have too many files open")
        if not data:
            raise EOFError
        if len(self._files) > MAX_FILES:
            raise ValueError("got descriptors that no message brings")
        self._arrived += data

    def messages(self) -> Iterator[Any]:
        """Yield those that are complete. Raises `ValueError` for garbage."""
        while len(self._arrived) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._arrived)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"got a message of {length} bytes, expected at most {MAX_FRAME_BYTES}")
            end = LENGTH.size + length
            if len(self._arrived) < end:
                return
            body = bytes(self._arrived[LENGTH.size : end])
            del self._arrived[:end]
            message = decode(self._decoders, body)
            if isinstance(message, Memory):
                if not self._files:
                    raise ValueError("got a Memory without its descriptor")
                message = with_file(message, self._files.popleft())
            yield message

    def close(self) -> None:
        self.socket.close()
        self.outbox.clear()
        while self._files:
            self._files.popleft().close()


class Waker:
    """Wakes a thread that selects. Thread-safe."""

    def __init__(self) -> None:
        with opening:
            self.receiver, self._sender = socket_pair()
        self.receiver.setblocking(False)
        self._sender.setblocking(False)

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it will wake; closed: there is no thread
            self._sender.send(b"\0")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self.receiver.recv(READ_BYTES)

    def close(self) -> None:
        self.receiver.close()
        self._sender.close()
