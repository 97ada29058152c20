"""A decode worker's data plane in the process of a test, and what it reads from `Peer`."""

import msgspec

from fastdeploy_kvcache_v1.transfer.socket_plane import SocketPlane
from fastdeploy_kvcache_v1.transfer.spans import Span, Spans
from tests.transfer.peer import (
    BLOCK_BYTES,
    CANARY,
    HOST,
    NUM_BLOCKS,
    NUM_REGIONS,
    SECRET,
    canaries,
    content,
    rows,
    soon,
)

EVERYTHING = list(range(NUM_BLOCKS))
THEIRS = content(1)


class Ours:
    """A decode worker's plane in this process, with tensors full of canaries."""

    def __init__(self, **settings):
        self.plane = SocketPlane(HOST, SECRET, **{"checksums": True, **settings})
        self.tensors = canaries()
        self.plane.register(rows(self.tensors))

    def open(self, address):
        return self.plane.open(address, soon())

    def is_untouched(self):
        return all((tensor == CANARY).all() for tensor in self.tensors)


def whole_blocks(sources, targets, regions=range(NUM_REGIONS)):
    spans = [
        Span(region, source * BLOCK_BYTES, target * BLOCK_BYTES, BLOCK_BYTES)
        for region in regions
        for source, target in zip(sources, targets, strict=True)
    ]
    return Spans.of(spans)


def fields_of(address):
    return msgspec.msgpack.decode(address)


def through(proxy, address):
    """The same plane, reached through a proxy."""
    kind, host, _, plane = fields_of(address)
    return msgspec.msgpack.encode([kind, host, int(proxy.address.rpartition(":")[2]), plane])
