"""A prefill rank and a decode rank with real sockets: in the process of a test, or in one of their own."""

from __future__ import annotations

import os
import time
from typing import Any

import msgspec
import numpy as np

from fastdeploy_kvcache_v1.attention.gqa import GQACacheBackend
from fastdeploy_kvcache_v1.errors import InvariantError
from fastdeploy_kvcache_v1.transfer.control_link import Self
from fastdeploy_kvcache_v1.transfer.fetch_desk import FetchDesk
from fastdeploy_kvcache_v1.transfer.geometry import Geometry
from fastdeploy_kvcache_v1.transfer.offer_desk import OfferDesk
from fastdeploy_kvcache_v1.transfer.settings import PeerPort, TransferSettings
from fastdeploy_kvcache_v1.transfer.socket_plane import SocketPlane
from fastdeploy_kvcache_v1.worker.hazards import Actor, HazardTable
from tests.transfer.child import ChildProcess
from tests.transfer.peer import CANARY, HOST, SECRET, rows

LAYERS, HEADS, BLOCK, DIM = 4, 4, 16, 32
NUM_BLOCKS = 64
TURN_S = 0.002


def geometry(tp_size=1, tp_rank=0, **changes):
    heads = max(1, HEADS // tp_size)
    layout = GQACacheBackend(LAYERS, heads, DIM, BLOCK, "float16").layout
    made = {"model": "m", "block_size": BLOCK, "tp_size": tp_size, "tp_rank": tp_rank, "num_kv_heads": HEADS}
    return Geometry.of(layout, **{**made, **changes})


def model_cache(seed):
    """The KV of all heads, `[layer and role][block, head, bytes]`, without a byte of `CANARY`."""
    rng = np.random.default_rng(seed)
    shape = (NUM_BLOCKS, HEADS, BLOCK * DIM * 2)
    return [rng.integers(0, CANARY, shape, np.uint8) for _ in range(2 * LAYERS)]


def part_of(cache, rank_geometry):
    """What a rank holds of `model_cache`, `[block, bytes]` each."""
    heads = rank_geometry.heads
    return [np.ascontiguousarray(each[:, heads.start : heads.stop]).reshape(NUM_BLOCKS, -1) for each in cache]


class _Rank:
    def __init__(self, tensors, settings, rank_geometry, plane=None, address=None):
        self.tensors = tensors
        self.hazards = HazardTable("device", NUM_BLOCKS)
        self.plane = plane or SocketPlane(HOST, SECRET, checksums=True)
        self.plane.register(rows(tensors))
        settings = TransferSettings(**{"secret": SECRET, "ping_s": 0.1, **settings})
        self.ours = Self(rank_geometry, address or self.plane.address(), settings)
        self.done: list[Any] = []


class PrefillRank(_Rank):
    """`seed` decides what its blocks hold."""

    def __init__(self, *, seed=1, settings=None, rank_geometry=None, digest=True, plane=None, address=None, **desk):
        rank_geometry = rank_geometry or geometry()
        super().__init__(part_of(model_cache(seed), rank_geometry), settings or {}, rank_geometry, plane, address)
        self.desk = OfferDesk(self.ours, self.plane, self.hazards, regions=rows(self.tensors) if digest else (), **desk)

    def offer(self, lease, slots, port, *, request=None, tokens=None):
        self.desk.open(lease, request or lease, slots, tokens or len(slots) * BLOCK, PeerPort(HOST, port))

    def all_there(self, lease, count):
        self.desk.progress(lease, count, LAYERS)

    def turn(self):
        self.done += self.desk.turn()
        self.desk.check()

    def close(self):
        self.desk.close()
        self.turn()
        self.desk.check_idle()
        self.plane.close()


class DecodeRank(_Rank):
    def __init__(self, *, settings=None, rank_geometry=None, digest=True, plane=None, port=0, **desk):
        rank_geometry = rank_geometry or geometry()
        tensors = [np.full((NUM_BLOCKS, role.block_bytes), CANARY, np.uint8) for role in rank_geometry.roles * LAYERS]
        super().__init__(tensors, settings or {}, rank_geometry, plane)
        regions = rows(tensors) if digest else ()
        self.desk = FetchDesk(self.ours, self.plane, self.hazards, HOST, port, regions=regions, **desk)
        self.step = 0

    @property
    def port(self):
        return self.desk.port

    def turn(self):
        self.done += self.desk.turn(self.step)
        self.desk.check()

    def refill(self):
        for tensor in self.tensors:
            tensor[:] = CANARY

    def touched(self):
        """Slots with a byte that is no canary."""
        return {slot for tensor in self.tensors for slot in np.flatnonzero((tensor != CANARY).any(axis=1)).tolist()}

    def holds(self, slots, seed, source_slots):
        cache = part_of(model_cache(seed), self.ours.geometry)
        pairs = zip(self.tensors, cache, strict=True)
        return all(np.array_equal(mine[list(slots)], theirs[list(source_slots)]) for mine, theirs in pairs)

    def close(self):
        self.desk.close()
        self.turn()
        self.desk.check_idle()
        self.plane.close()


QUICK = {"silence_s": 3.0}
"""A stopped peer is found after 3 s; a busy machine is not taken for one."""


def make_prefill(seed, data_port=None, **arguments):
    """`data_port`: of a proxy that forwards to the data plane at `plane_port`."""
    plane_port = arguments.pop("plane_port", 0)
    plane = SocketPlane(HOST, SECRET, port=plane_port, checksums=True)
    address = plane.address()
    if data_port is not None:
        kind, host, _, nonce = msgspec.msgpack.decode(address)
        address = msgspec.msgpack.encode([kind, host, data_port, nonce])
    return PrefillRank(seed=seed, plane=plane, address=address, **arguments)


def make_decode(**arguments):
    return DecodeRank(settings=QUICK, **arguments)


def until(condition, *ranks, seconds=30.0):
    """Let ranks take turns until something is so."""
    deadline = time.monotonic() + seconds
    while not condition():
        for rank in ranks:
            rank.turn()
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(TURN_S)


def result_of(decode, request="r"):
    (result,) = [each for each in decode.done if each.request_id == request]
    return result


def both_ended(prefill, decode, fetches=1, leases=1):
    return lambda: len(decode.done) >= fetches and len(prefill.done) >= leases


def run(connection, make, arguments):
    """The loop of a rank in its own process: takes turns, and between them runs what it is asked."""
    rank = make(**arguments)
    connection.send(os.getpid())
    while True:
        rank.turn()
        if connection.poll(TURN_S):
            try:
                function, *given = connection.recv()
            except EOFError:
                os._exit(0)
            connection.send(function(rank, *given))


class RankProcess(ChildProcess):
    """`ask(function, ...)` calls `function(rank, ...)` there; it must be one that can be pickled."""

    def __init__(self, make, **arguments):
        super().__init__(run, make, arguments)


# ---- what a rank in its own process is asked


def offer(rank, lease, slots, port):
    rank.offer(lease, slots, port)


def all_there(rank, lease, count):
    rank.all_there(lease, count)


def progress(rank, lease, end_block, end_layer):
    rank.desk.progress(lease, end_block, end_layer)


def fetch(rank, request_id, slots):
    rank.desk.fetch(request_id, slots)


def done(rank):
    return rank.done


def port(rank):
    return rank.port


def num_open(rank):
    return len(rank.desk)


def is_idle(rank):
    """No lease, fetch or offer is open, and nothing holds a slot."""
    try:
        rank.desk.check_idle()
    except InvariantError:
        return False
    return rank.hazards.before(Actor.COMPUTE, writes=None) == []


def plane_address(rank):
    return rank.plane.address()
