"""A prefill worker's data plane in a process of its own, with tensors whose bytes a test knows."""

from __future__ import annotations

import os
import time

import numpy as np

from fastdeploy_kvcache_v1.transfer.socket_plane import SocketPlane
from fastdeploy_kvcache_v1.worker.ops.rows import tensor_rows
from tests.transfer.child import ChildProcess

SECRET = b"sixteen bytes or more"
HOST = "127.0.0.1"
NUM_BLOCKS = 64
BLOCK_BYTES = 65536
NUM_REGIONS = 4
CANARY = 0xEE


def soon(seconds=20.0):
    """A deadline that only a broken test meets."""
    return time.monotonic() + seconds


def content(seed, *, num_blocks=NUM_BLOCKS, block_bytes=BLOCK_BYTES, num_regions=NUM_REGIONS):
    """Tensors `[num_blocks, block_bytes]`, without a byte of `CANARY`."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, CANARY, (num_blocks, block_bytes), np.uint8) for _ in range(num_regions)]


def canaries(*, num_blocks=NUM_BLOCKS, block_bytes=BLOCK_BYTES, num_regions=NUM_REGIONS):
    return [np.full((num_blocks, block_bytes), CANARY, np.uint8) for _ in range(num_regions)]


def rows(tensors):
    return [tensor_rows(each, num_rows=len(each), row_bytes=each[0].nbytes) for each in tensors]


def serve(connection, make_plane, seed):
    """Answers `(method, *arguments)` of the plane until the other end is gone."""
    tensors = content(seed)
    plane = make_plane()
    plane.register(rows(tensors))
    connection.send(plane.address())
    while True:
        try:
            name, *arguments = connection.recv()
        except EOFError:
            os._exit(0)
        if name == "overwrite":
            tensors[0][:] = 1
            connection.send(None)
        else:
            attribute = getattr(plane, name)
            connection.send(attribute(*arguments) if callable(attribute) else attribute)


def socket_plane(port=0, checksums=True):
    return SocketPlane(HOST, SECRET, port=port, checksums=checksums)


class Peer(ChildProcess):
    """The process. `ask(method, ...)` calls its plane."""

    def __init__(self, make_plane=socket_plane, seed=1):
        super().__init__(serve, make_plane, seed)
        self.address = self.hello


def mooncake_plane():
    from fastdeploy_kvcache_v1.transfer.mooncake_plane import MooncakePlane

    return MooncakePlane(HOST)
