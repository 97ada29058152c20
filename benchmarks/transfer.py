"""Rates of reading scattered blocks of another process: the socket plane over a plain socket, in turns.
Also the Mooncake plane over Mooncake's engine; the plain socket uses one `sendall` and one `recv_into` a block.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import multiprocessing
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np
from _support import begin, median, sized

from fastdeploy_kvcache_v1.transfer.mooncake_plane import MooncakePlane
from fastdeploy_kvcache_v1.transfer.socket_plane import SocketPlane
from fastdeploy_kvcache_v1.transfer.spans import Spans
from fastdeploy_kvcache_v1.worker.ops.rows import tensor_rows

HOST = "127.0.0.1"
SECRET = b"benchmark of the transfer"
NUM_ROWS = 1024
CASES = sized([(4 << 10, 512), (128 << 10, 256), (512 << 10, 64)], [(4 << 10, 8)])
"""Bytes of a block in one layer, and blocks read at once."""

TURNS = sized(25, 1)

Tensor = np.ndarray[Any, np.dtype[np.uint8]]


def serve_plain(listener: socket.socket, tensor: Tensor) -> None:
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection:
        while header := connection.recv(4, socket.MSG_WAITALL):
            rows = np.frombuffer(connection.recv(8 * int.from_bytes(header, "little"), socket.MSG_WAITALL), np.int64)
            for row in rows.tolist():
                connection.sendall(tensor[row].data)


def peer(connection: Connection, block_bytes: int) -> None:
    tensor = np.full((NUM_ROWS, block_bytes), 7, np.uint8)
    plane = SocketPlane(HOST, SECRET)
    plane.register([tensor_rows(tensor, num_rows=NUM_ROWS, row_bytes=block_bytes)])
    plane.grant("all", range(NUM_ROWS))
    listener = socket.create_server((HOST, 0))
    connection.send((plane.address(), listener.getsockname()))
    serve_plain(listener, tensor)


def plain_read(connection: socket.socket, sources: Tensor, targets: Tensor, tensor: Tensor) -> None:
    connection.sendall(len(sources).to_bytes(4, "little") + sources.tobytes())
    for row in targets.tolist():
        view = tensor[row].data
        while len(view):
            view = view[connection.recv_into(view) :]


def spans_between(sources: Tensor, targets: Tensor, size: int) -> Spans:
    table = np.zeros((len(sources), 4), np.int64)
    table[:, 1], table[:, 2], table[:, 3] = sources * size, targets * size, size
    return Spans(table)


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure_socket(block_bytes: int, count: int) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=peer, args=(theirs, block_bytes), daemon=True)
    process.start()
    address, plain_address = ours.recv()
    tensor = np.zeros((NUM_ROWS, block_bytes), np.uint8)
    region = [tensor_rows(tensor, num_rows=NUM_ROWS, row_bytes=block_bytes)]
    planes = [SocketPlane(HOST, SECRET, checksums=checksums) for checksums in (False, True)]
    for plane in planes:
        plane.register(region)
    read, checked = (plane.open(address, time.monotonic() + 10) for plane in planes)
    connection = socket.create_connection(plain_address)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    rng = np.random.default_rng(0)
    took: dict[str, list[float]] = {"plain": [], "plane": [], "with_checksums": []}
    for turn in range(TURNS + 1):
        sources, targets = (rng.permutation(NUM_ROWS)[:count].astype(np.int64) for _ in range(2))
        spans = spans_between(sources, targets, block_bytes)
        turns = [
            seconds(lambda a=sources, b=targets: plain_read(connection, a, b, tensor)),
            seconds(lambda s=spans: read.read("all", s, time.monotonic() + 60)),
            seconds(lambda s=spans: checked.read("all", s, time.monotonic() + 60)),
        ]
        assert (tensor[targets] == 7).all()
        tensor[:] = 0
        if turn:  # the first one warms up
            for name, value in zip(took, turns, strict=True):
                took[name].append(value)
    for each in (read, checked, *planes, connection):
        each.close()
    process.kill()
    process.join()
    whole = count * block_bytes
    return {
        "block_bytes": block_bytes,
        "blocks": count,
        "plain_gb_per_s": whole / median(took["plain"]) / 1e9,
        "plane_gb_per_s": whole / median(took["plane"]) / 1e9,
        "over_plain": median(a / b for a, b in zip(took["plain"], took["plane"], strict=True)),
        "with_checksums_over_plain": median(a / b for a, b in zip(took["plain"], took["with_checksums"], strict=True)),
    }


def mooncake_peer(connection: Connection, block_bytes: int) -> None:
    tensor = np.full((NUM_ROWS, block_bytes), 7, np.uint8)
    plane = MooncakePlane(HOST)
    plane.register([tensor_rows(tensor, num_rows=NUM_ROWS, row_bytes=block_bytes)])
    connection.send(plane.address())
    connection.recv()


def measure_mooncake(block_bytes: int, count: int) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=mooncake_peer, args=(theirs, block_bytes), daemon=True)
    process.start()
    address = ours.recv()
    _, _, session, [[remote, _]] = msgspec.msgpack.decode(address)
    tensor = np.zeros((NUM_ROWS, block_bytes), np.uint8)
    plane = MooncakePlane(HOST)
    plane.register([tensor_rows(tensor, num_rows=NUM_ROWS, row_bytes=block_bytes)])
    source = plane.open(address, time.monotonic() + 10)
    engine: Any = importlib.import_module("mooncake.engine").TransferEngine()
    assert engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "") == 0
    assert engine.register_memory(tensor.ctypes.data, tensor.nbytes) == 0

    def direct(sources: Tensor, targets: Tensor) -> None:
        here = [tensor.ctypes.data + row * block_bytes for row in targets.tolist()]
        there = [remote + row * block_bytes for row in sources.tolist()]
        assert engine.batch_transfer_sync_read(session, here, there, [block_bytes] * count) == 0

    rng = np.random.default_rng(0)
    took: dict[str, list[float]] = {"direct": [], "plane": []}
    for turn in range(TURNS + 1):
        sources, targets = (rng.permutation(NUM_ROWS)[:count].astype(np.int64) for _ in range(2))
        spans = spans_between(sources, targets, block_bytes)
        turns = [
            seconds(lambda a=sources, b=targets: direct(a, b)),
            seconds(lambda s=spans: source.read("all", s, time.monotonic() + 60)),
        ]
        assert (tensor[targets] == 7).all()
        tensor[:] = 0
        if turn:
            for name, value in zip(took, turns, strict=True):
                took[name].append(value)
    plane.close()
    process.kill()
    process.join()
    return {
        "block_bytes": block_bytes,
        "blocks": count,
        "direct_gb_per_s": count * block_bytes / median(took["direct"]) / 1e9,
        "over_direct": median(a / b for a, b in zip(took["direct"], took["plane"], strict=True)),
    }


def main() -> None:
    run = begin()
    result = {
        "turns": TURNS,
        "socket": [measure_socket(*case) for case in CASES],
        "mooncake_version": importlib.metadata.version("mooncake-transfer-engine-non-cuda"),
        "mooncake": [measure_mooncake(*case) for case in CASES],
    }
    run.save(result)


if __name__ == "__main__":
    main()
