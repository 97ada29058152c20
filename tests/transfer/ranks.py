"""A prefill rank and a decode rank, on a network in memory or on sockets, and what their blocks hold."""

from __future__ import annotations

import time

import numpy as np

from fastdeploy_kvcache_v1.attention.layouts import GQACacheBackend
from fastdeploy_kvcache_v1.transfer.control_link import Self
from fastdeploy_kvcache_v1.transfer.fetch_desk import FetchDesk
from fastdeploy_kvcache_v1.transfer.geometry import Geometry
from fastdeploy_kvcache_v1.transfer.network import SOCKETS
from fastdeploy_kvcache_v1.transfer.offer_desk import OfferDesk
from fastdeploy_kvcache_v1.transfer.settings import PeerPort, TransferSettings
from fastdeploy_kvcache_v1.transfer.socket_plane import SocketPlane
from fastdeploy_kvcache_v1.worker.hazards import Actor, HazardTable
from fastdeploy_kvcache_v1.worker.ops.rows import tensor_rows
from tests.gpu.plane_contract import CANARY
from tests.transfer.planes import HOST, SECRET

LAYERS, HEADS, BLOCK, DIM = 4, 4, 16, 32
NUM_BLOCKS = 64


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


def rows(tensors):
    return [tensor_rows(each, num_rows=len(each), row_bytes=each[0].nbytes) for each in tensors]


class Sockets:
    """The real network, where a test needs a few milliseconds. As `MemoryNetwork`."""

    rounds = 15_000

    def ends(self):
        return SOCKETS

    def plane(self, name, tensors):
        made = SocketPlane(HOST, SECRET, checksums=True)
        made.register(rows(tensors))
        return made

    def settle(self):
        time.sleep(0.002)


WHOLE = geometry()


class _Rank:
    step = None

    def __init__(self, net, tensors, rank_geometry):
        self.net, self.tensors, self.done = net, tensors, []
        self.hazards = HazardTable("device", NUM_BLOCKS)
        self.plane = net.plane(f"rank {id(self)}", tensors)
        self.ours = Self(rank_geometry, self.plane.address(), TransferSettings(secret=SECRET, ping_s=0.1))

    def make_desk(self, kind, *listening, **given):
        given = {"regions": rows(self.tensors), "network": self.net.ends(), **given}
        return kind(self.ours, self.plane, self.hazards, *listening, **given)

    def turn(self):
        self.done += self.desk.turn() if self.step is None else self.desk.turn(self.step)
        self.desk.check()

    def is_idle(self):
        """No lease, fetch or offer is open, and nothing holds a slot."""
        self.desk.check_idle()
        return self.hazards.before(Actor.COMPUTE, writes=range(self.hazards.num_slots)) == []

    def close(self):
        self.desk.close()
        self.turn()
        self.desk.check_idle()
        self.plane.close()


class PrefillRank(_Rank):
    """`seed` decides what its blocks hold."""

    def __init__(self, net, *, seed=1, rank_geometry=WHOLE, **desk):
        super().__init__(net, part_of(model_cache(seed), rank_geometry), rank_geometry)
        self.desk = self.make_desk(OfferDesk, **desk)

    def offer(self, lease, slots, port, *, request=None, tokens=None):
        self.desk.open(lease, request or lease, slots, tokens or len(slots) * BLOCK, PeerPort(HOST, port))

    def all_there(self, lease, count):
        self.desk.progress(lease, count, LAYERS)


class DecodeRank(_Rank):
    def __init__(self, net, *, rank_geometry=WHOLE, port=0, **desk):
        tensors = [np.full((NUM_BLOCKS, role.block_bytes), CANARY, np.uint8) for role in rank_geometry.roles * LAYERS]
        super().__init__(net, tensors, rank_geometry)
        self.desk, self.step = self.make_desk(FetchDesk, HOST, port, **desk), 0
        self.port = self.desk.port

    def touched(self):
        """Slots with a byte that is no canary."""
        return {slot for tensor in self.tensors for slot in np.flatnonzero((tensor != CANARY).any(axis=1)).tolist()}

    def holds(self, slots, seed, source_slots):
        cache = part_of(model_cache(seed), self.ours.geometry)
        pairs = zip(self.tensors, cache, strict=True)
        return all(np.array_equal(mine[list(slots)], theirs[list(source_slots)]) for mine, theirs in pairs)


def until(condition, *ranks):
    """Let ranks take turns, and what is on its way arrive, until something is so."""
    net = ranks[0].net
    for _ in range(net.rounds):
        if condition():
            return
        for rank in ranks:
            rank.turn()
        net.settle()
    raise AssertionError("it did not happen")


def result_of(decode, request="r"):
    (result,) = [each for each in decode.done if each.request_id == request]
    return result


def both_ended(prefill, decode, fetches=1, leases=1):
    return lambda: len(decode.done) >= fetches and len(prefill.done) >= leases
