"""Share of a slow transfer that hides behind the prefill, by how blocks are announced, over real sockets.
Prefill and network only wait, and the transfer takes half as long as the prefill; the rest after its end is exposed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from _support import begin, median, sized

from fastdeploy_kvcache_v1.attention.layouts import GQACacheBackend
from fastdeploy_kvcache_v1.transfer.control_link import Self
from fastdeploy_kvcache_v1.transfer.geometry import Geometry
from fastdeploy_kvcache_v1.transfer.plane import Source
from fastdeploy_kvcache_v1.transfer.rank_messages import OpenLease, StartFetch
from fastdeploy_kvcache_v1.transfer.rank_transfers import RankTransfers
from fastdeploy_kvcache_v1.transfer.settings import PeerPort, TransferSettings
from fastdeploy_kvcache_v1.transfer.socket_plane import SocketPlane
from fastdeploy_kvcache_v1.transfer.spans import Spans
from fastdeploy_kvcache_v1.worker.hazards import HazardTable
from fastdeploy_kvcache_v1.worker.ops.rows import tensor_rows

HOST, SECRET = "127.0.0.1", b"the secret of this benchmark"
LAYERS, BLOCK, NUM_BLOCKS = 24, 64, 64
PREFILL_S = sized(2.0, 0.1)
CHUNKS = 4
TURNS = sized(5, 1)
TURN_S = 0.001


class SlowSource(Source):
    """A source that takes as long as a network of `bytes_per_s`."""

    def __init__(self, inner: Source, bytes_per_s: float) -> None:
        self._inner, self._bytes_per_s = inner, bytes_per_s

    def read(self, lease: str, spans: Spans, deadline: float) -> None:
        begin = time.perf_counter()
        self._inner.read(lease, spans, deadline)
        time.sleep(max(0.0, spans.num_bytes / self._bytes_per_s - (time.perf_counter() - begin)))

    def close(self) -> None:
        self._inner.close()


class SlowPlane(SocketPlane):
    bytes_per_s = float("inf")

    def open(self, address: bytes, deadline: float) -> Source:
        return SlowSource(super().open(address, deadline), self.bytes_per_s)


class Rank:
    """One side of the transfer."""

    def __init__(self, *, is_decode: bool) -> None:
        layout = GQACacheBackend(LAYERS, 4, 32, BLOCK, "float16").layout
        geometry = Geometry.of(layout, model="m", block_size=BLOCK)
        self.tensors = [np.zeros((NUM_BLOCKS, role.block_bytes), np.uint8) for role in layout.roles * LAYERS]
        self.plane = SlowPlane(HOST, SECRET, checksums=True)
        self.plane.register([tensor_rows(each, num_rows=NUM_BLOCKS, row_bytes=each.shape[1]) for each in self.tensors])
        self.num_bytes = sum(each.nbytes for each in self.tensors)
        ours = Self(geometry, self.plane.address(), TransferSettings(secret=SECRET))
        listen = PeerPort(HOST, 0) if is_decode else None
        self.transfers = RankTransfers(ours, self.plane, HazardTable("device", NUM_BLOCKS), listen=listen)


def compute(transfers: RankTransfers, name: str, tell_layers: bool, ends: Sequence[int]) -> None:
    """Wait as long as a prefill computes, layer by layer, and announce finished blocks."""
    for end in ends:
        transfers.begin_pass([(name, end)])
        for layer in range(LAYERS):
            if tell_layers:
                transfers.layer_begins(layer)
            time.sleep(PREFILL_S / len(ends) / LAYERS)
        transfers.end_pass([name])


def fetch_s(prefill: Rank, decode: Rank, name: str, work: Callable[[], None]) -> tuple[float, float]:
    """Seconds of `work`, and seconds from its end to the end of the fetch."""
    slots = tuple(range(NUM_BLOCKS))
    arrived = threading.Event()

    def decode_loop() -> None:
        decode.transfers.handle([StartFetch(name, slots, 0)])
        while not arrived.is_set():
            decode.transfers.turn()
            for result in decode.transfers.take_news().fetches:
                assert result.error is None, result.error
                arrived.set()
            time.sleep(TURN_S)

    thread = threading.Thread(target=decode_loop)
    thread.start()
    port = decode.transfers.port
    assert port is not None
    prefill.transfers.handle([OpenLease(name, name, slots, NUM_BLOCKS * BLOCK, (PeerPort(HOST, port),))])
    begin = time.perf_counter()
    work()
    computed = time.perf_counter()
    while not arrived.is_set():
        prefill.transfers.turn()
        time.sleep(TURN_S)
    end = time.perf_counter()
    thread.join()
    while prefill.transfers.is_busy:
        prefill.transfers.turn()
    return computed - begin, end - computed


def main() -> None:
    run = begin()
    prefill, decode = Rank(is_decode=False), Rank(is_decode=True)
    decode.plane.bytes_per_s = prefill.num_bytes / (PREFILL_S / 2)
    whole = [NUM_BLOCKS * BLOCK]
    chunks = [NUM_BLOCKS * BLOCK * (number + 1) // CHUNKS for number in range(CHUNKS)]
    ways: dict[str, Callable[[str], Callable[[], None]]] = {
        "layer by layer": lambda name: lambda: compute(prefill.transfers, name, True, chunks),
        "chunk by chunk": lambda name: lambda: compute(prefill.transfers, name, False, chunks),
        "all at the end": lambda name: lambda: compute(prefill.transfers, name, False, whole),
    }
    measured: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for turn in range(TURNS):
        for way, work in ways.items():
            name = f"{way} {turn}"
            measured[way].append(fetch_s(prefill, decode, name, work(name)))
    # Blocks announced at the end cannot hide, so that is the transfer alone, with its messages.
    alone_s = median(exposed for _, exposed in measured["all at the end"])
    rows: dict[str, Any] = {
        way: {
            "exposed_ms": 1e3 * median(exposed for _, exposed in pairs),
            "hidden_share": 1 - median(exposed for _, exposed in pairs) / alone_s,
        }
        for way, pairs in measured.items()
    }
    prefill.transfers.close()
    decode.transfers.close()
    sizes = {"prefill_s": PREFILL_S, "chunks": CHUNKS, "layers": LAYERS, "mib": prefill.num_bytes / 2**20}
    run.save({**sizes, "turns": TURNS, "transfer_ms": 1e3 * alone_s, "told": rows})


if __name__ == "__main__":
    main()
