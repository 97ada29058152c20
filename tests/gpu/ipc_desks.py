"""A prefill and a decode rank on one GPU: offers, progress, fetches over their control link, bytes by `CudaIpcPlane`.

The checks are the decode rank; as a program this is the prefill rank, which answers on its pipes as `ipc_peer.py` does.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import cupy
import numpy as np
from ipc_peer import Peer, answer
from plane_contract import CANARY

from fastdeploy_kvcache_v1.attention.gqa import GQACacheBackend
from fastdeploy_kvcache_v1.transfer.control_link import Self
from fastdeploy_kvcache_v1.transfer.cuda_ipc_plane import CudaIpcPlane
from fastdeploy_kvcache_v1.transfer.fetch import FetchResult
from fastdeploy_kvcache_v1.transfer.fetch_desk import FetchDesk
from fastdeploy_kvcache_v1.transfer.geometry import Geometry
from fastdeploy_kvcache_v1.transfer.offer_desk import LeaseEnd, OfferDesk
from fastdeploy_kvcache_v1.transfer.settings import PeerPort, TransferSettings
from fastdeploy_kvcache_v1.worker.hazards import HazardTable
from fastdeploy_kvcache_v1.worker.ops import BlockRows

HOST = "127.0.0.1"
LAYERS, HEADS, BLOCK, DIM, NUM_BLOCKS = 4, 2, 16, 32, 12
SECRET = b"sixteen bytes or more"
SOURCES, TARGETS = [3, 4, 9, 1], [7, 2, 5, 6]
SECONDS = 60.0
TURN_S = 0.002


def geometry() -> Geometry:
    layout = GQACacheBackend(LAYERS, HEADS, DIM, BLOCK, "float16").layout
    return Geometry.of(layout, model="m", block_size=BLOCK, tp_size=1, tp_rank=0, num_kv_heads=HEADS)


def byte_of(region: int, block: int) -> int:
    """What the prefill rank computes there."""
    return 1 + region * NUM_BLOCKS + block


class Rank:
    """Tensors, their plane, and what it says about itself."""

    def __init__(self) -> None:
        widths = [role.block_bytes for role in geometry().roles] * LAYERS
        self.arrays = [cupy.full((NUM_BLOCKS, width), CANARY, cupy.uint8) for width in widths]
        cupy.cuda.Device().synchronize()
        self.plane = CudaIpcPlane()
        self.plane.register(
            [
                BlockRows(int(each.data.ptr), NUM_BLOCKS, each.shape[1], each.shape[1], on_gpu=True, owner=each)
                for each in self.arrays
            ]
        )
        settings = TransferSettings(secret=SECRET, ping_s=0.1, silence_s=5.0, handshake_s=20.0)
        self.ours = Self(geometry(), self.plane.address(), settings)
        self.hazards = HazardTable("device", NUM_BLOCKS)


class PrefillRank(Rank):
    def __init__(self) -> None:
        super().__init__()
        self.desk = OfferDesk(self.ours, self.plane, self.hazards)
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.ends: list[LeaseEnd] = []

    def turn(self) -> None:
        self.ends += self.desk.turn()

    def address(self) -> bytes:
        return self.plane.address()

    def offer(self, port: int) -> None:
        self.desk.open("lease", "request", SOURCES, len(SOURCES) * BLOCK, PeerPort(HOST, port))

    def compute(self, layer: int) -> None:
        """As a forward pass; the layer is told when its event has passed, and not before."""
        roles = len(geometry().roles)
        with self.stream:
            for region in range(layer * roles, (layer + 1) * roles):
                for block in SOURCES:
                    self.arrays[region][block].fill(byte_of(region, block))
            event = self.stream.record()
        while not event.done:
            pass
        self.desk.progress("lease", len(SOURCES), layer + 1)

    def end_of_lease(self) -> str | None:
        """Why it ended, None for well."""
        until = time.monotonic() + SECONDS
        while not self.ends:
            assert time.monotonic() < until, "the lease does not end"
            self.turn()
            time.sleep(TURN_S)
        return self.ends[0].error

    def leave(self) -> None:
        self.desk.close()
        self.plane.close()
        self.desk.check_idle()


class DecodeRank(Rank):
    def __init__(self) -> None:
        super().__init__()
        self.desk = FetchDesk(self.ours, self.plane, self.hazards, HOST)
        self.results: list[FetchResult] = []

    def turn_until(self, is_so: Callable[[], object]) -> None:
        until = time.monotonic() + SECONDS
        while not is_so():
            assert time.monotonic() < until, f"waited too long: {self.results}"
            self.results += self.desk.turn(0)
            self.desk.check()
            time.sleep(TURN_S)

    def has_layers(self, count: int) -> bool:
        """Whether the first `count` layers are there, and nothing else is."""
        cupy.cuda.Device().synchronize()
        roles = len(geometry().roles)
        for region, array in enumerate(self.arrays):
            expected = np.full(array.shape, CANARY, np.uint8)
            if region < count * roles:
                for source, target in zip(SOURCES, TARGETS, strict=True):
                    expected[target] = byte_of(region, source)
            if not np.array_equal(cupy.asnumpy(array), expected):
                return False
        return True

    def close(self) -> None:
        self.desk.close()
        self.desk.turn(0)
        self.desk.check_idle()
        self.plane.close()


def a_request_is_fetched_layer_by_layer_while_it_is_computed() -> None:
    peer, mine = Peer(0, __file__), DecodeRank()
    mine.desk.fetch("request", TARGETS)
    peer.ask("offer", mine.desk.port)
    for layer in range(LAYERS):
        peer.ask("compute", layer)
        mine.turn_until(lambda layer=layer: mine.has_layers(layer + 1))
    peer.tell("end_of_lease")
    mine.turn_until(lambda: mine.results)
    assert peer.hear() is None
    (result,) = mine.results
    assert (result.error, result.failed_slots) == (None, ())
    assert result.num_bytes == sum(array.shape[1] for array in mine.arrays) * len(SOURCES)
    peer.tell("leave")
    mine.turn_until(lambda: not mine.desk.num_links)  # so the memory is closed, and the peer can free it
    peer.hear()
    peer.kill()
    mine.close()


CHECKS = {check.__name__: check for check in (a_request_is_fetched_layer_by_layer_while_it_is_computed,)}


if __name__ == "__main__":
    prefill = PrefillRank()
    answer(prefill, prefill.turn)
