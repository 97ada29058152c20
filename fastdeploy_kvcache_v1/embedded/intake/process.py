"""The intake process: reads large bodies, and chats whose template is code of the model's directory.

`python -m fastdeploy_kvcache_v1.embedded.intake.process FD`. Whatever a body or a template does, it takes the time and
memory of this process, never the server's: limits end it, the server answers and starts another. It sends bytes that
the server checks (JSON and token ids), no pickles.

A frame is its header and its two parts. Server to process: the config once, then an endpoint and a body each time.
Process to server: `READY` or `REFUSED` once, then one `READING` or `ERROR` per body.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ...errors import ModelError
from ...model.vision import PATCH_BYTES, Image, PlacedImage
from ...orphan import die_with_parent
from ...units import MIB
from ..api_error import ApiError
from ..text import load_tokenizer
from .intake import Endpoint, Intake, IntakeConfig, Options, Reading

READY, REFUSED, READING, ERROR = range(4)

HEADER = struct.Struct("!BQQ")
"""Kind of the frame, and the sizes of its two parts."""

MIN_MEMORY = 1024 * MIB
MEMORY_PER_BODY_BYTE = 64
"""A body of `[],[],[],...` takes 30."""

BASE_CPU_S = 0.5
CPU_S_PER_MIB = 2.0
"""Tokenizers manage about a MiB in a second."""


class Frame(NamedTuple):
    kind: int
    head: bytes | bytearray
    tail: bytes | bytearray


@dataclass(frozen=True)
class Launch:
    config: IntakeConfig
    parent_pid: int


def cpu_seconds(size: int) -> float:
    """What a body of `size` bytes may take."""
    return BASE_CPU_S + CPU_S_PER_MIB * size / MIB


def memory_bytes(config: IntakeConfig) -> int:
    """What reading may take beside the process itself."""
    return max(MIN_MEMORY, int(MEMORY_PER_BODY_BYTE * config.max_request_mib * MIB))


def send(connection: socket.socket, frame: Frame) -> None:
    connection.sendall(HEADER.pack(frame.kind, len(frame.head), len(frame.tail)) + frame.head)
    connection.sendall(frame.tail)


def receive(connection: socket.socket, *, deadline: float | None = None, most: int | None = None) -> Frame:
    """Raises `EOFError` at the connection's end, `TimeoutError` at `deadline` (`time.monotonic`), and `ValueError` for
    a frame of more than `most` bytes.
    """
    kind, head, tail = HEADER.unpack(_exactly(connection, HEADER.size, deadline))
    if most is not None and head + tail > most:
        raise ValueError(f"a frame of {head + tail} bytes")
    return Frame(kind, _exactly(connection, head, deadline), _exactly(connection, tail, deadline))


def _exactly(connection: socket.socket, size: int, deadline: float | None) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    done = 0
    while done < size:
        if deadline is not None:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
        received = connection.recv_into(view[done:])
        if not received:
            raise EOFError("the connection has ended")
        done += received
    view.release()
    return data


def pack_reading(reading: Reading) -> Frame:
    """The tail is the pixels of the images, one after the other, and then the token ids."""
    shapes = [(placed.offset, placed.image.rows, placed.image.columns) for placed in reading.images]
    head = json.dumps({"images": shapes, **dataclasses.asdict(reading.options)}).encode()
    pixels = b"".join(placed.image.pixels for placed in reading.images)
    return Frame(READING, head, pixels + array("i", reading.token_ids).tobytes())


def unpack_reading(frame: Frame) -> Reading:
    """Raises `ValueError` for images that are none."""
    fields = json.loads(frame.head)
    for name in ("stops", "stop_token_ids"):
        fields[name] = tuple(fields[name])
    images, first = [], 0
    for offset, rows, columns in fields.pop("images"):
        end = first + rows * columns * PATCH_BYTES
        images.append(PlacedImage(offset, Image(rows, columns, bytes(frame.tail[first:end]))))
        first = end
    token_ids = array("i")
    token_ids.frombytes(frame.tail[first:])
    return Reading(tuple(token_ids), Options(**fields), tuple(images))


def pack_error(error: ApiError) -> Frame:
    return Frame(ERROR, json.dumps({"status": error.status, **error.body["error"]}).encode(), b"")


def unpack_error(frame: Frame) -> ApiError:
    fields = json.loads(frame.head)
    return ApiError(fields["status"], fields["message"], fields["param"], fields["code"])


def main() -> int:
    connection = socket.socket(fileno=int(sys.argv[1]))
    launch: Launch = pickle.loads(receive(connection).head)
    die_with_parent(launch.parent_pid)
    try:
        intake = _build(launch.config)
    except (ModelError, MemoryError, RecursionError) as error:
        reason = str(error) if isinstance(error, ModelError) else f"the chat template does not compile: {error!r}"
        send(connection, Frame(REFUSED, reason.encode("utf-8", "replace"), b""))
        return 1
    send(connection, Frame(READY, b"", b""))
    while True:
        try:
            request = receive(connection)
        except (EOFError, ConnectionError):
            return 0
        with _limited_cpu(cpu_seconds(len(request.tail))):
            answer = _answer(intake, request)
        send(connection, answer)


def _answer(intake: Intake, request: Frame) -> Frame:
    try:
        return pack_reading(intake.read(Endpoint(request.head.decode()), request.tail))
    except ApiError as error:
        return pack_error(error)


def _build(config: IntakeConfig) -> Intake:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer = load_tokenizer(config.model_path)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    _limit(resource.RLIMIT_AS, used + memory_bytes(config))
    return Intake(config, tokenizer)


@contextmanager
def _limited_cpu(seconds: float) -> Iterator[None]:
    """Beyond, the kernel ends this process (SIGPROF). RLIMIT_CPU would count whole seconds."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


if __name__ == "__main__":
    sys.exit(main())
