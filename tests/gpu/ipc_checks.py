"""`CudaIpcPlane` between two processes on one GPU: the contract of all planes, and what only a GPU can be asked.

`suite.py` runs them.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import cache, partial

import cupy
import numpy as np
from ipc_peer import Peer
from plane_contract import CUDA_IPC, SECONDS, GpuTensors, Ours, canaries, expect, soon, whole_blocks

from fastdeploy_kvcache_v1.errors import ConfigError, RemoteReadError
from fastdeploy_kvcache_v1.transfer.cuda_ipc_plane import CudaIpcPlane
from fastdeploy_kvcache_v1.transfer.cuda_ipc_source import CudaIpcSource
from fastdeploy_kvcache_v1.worker.ops import BlockRows


class TwoProcesses:
    """This one reads; peers are processes."""

    limits = (CudaIpcSource, "most_spans", "most_bytes")

    def make(self) -> CudaIpcPlane:
        return CudaIpcPlane()

    @contextmanager
    def ours(self) -> Iterator[Ours]:
        with closing(CudaIpcPlane()) as plane:
            yield Ours(plane, GpuTensors(canaries()))

    @cache  # noqa: B019  one for all checks: starting it takes seconds
    def peer(self) -> Peer:
        return Peer()

    @contextmanager
    def own_peer(self) -> Iterator[Peer]:
        with closing(Peer(3)) as peer:
            yield peer


WORLD = TwoProcesses()


def what_the_peer_has_computed_is_what_is_read() -> None:
    """Its kernels have ended when it says so; then a thread of another process sees their bytes, as a desk's does."""
    with WORLD.own_peer() as peer, WORLD.ours() as mine, ThreadPoolExecutor(1) as thread:
        source = thread.submit(mine.open, peer).result()
        for value in range(1, 21):
            peer.ask("compute", value, value)
            thread.submit(source.read, "any", whole_blocks([value], [0]), soon()).result()
            assert all((tensor[0] == value).all() for tensor in mine.tensors.read()), value
        source.close()


def memory_that_cannot_be_exported_is_refused_at_the_start() -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    address = cupy.cuda.runtime.mallocAsync(4096, stream.ptr)
    stream.synchronize()
    for each, part in (
        (BlockRows(address, 4, 1024, 1024, on_gpu=True), "FLAGS_use_cuda_malloc_async_allocator"),
        (BlockRows(np.zeros(4096, np.uint8).ctypes.data, 4, 1024, 1024), "cuda_ipc needs a GPU"),
    ):
        expect(ConfigError, part, CudaIpcPlane().register, [each])


def an_owner_waits_until_its_memory_is_closed_elsewhere() -> None:
    with WORLD.own_peer() as peer, WORLD.ours() as mine:
        source = mine.open(peer)
        source.read("any", whole_blocks([0], [0]), soon())
        peer.tell("leave", SECONDS)
        assert not select.select([peer.process.stdout], [], [], 0.3)[0], "it did not wait"
        source.read("any", whole_blocks([1], [1]), soon())
        source.close()
        peer.hear()
        expect(RemoteReadError, "has ended", mine.open, peer)


CHECKS: dict[str, Callable[[], None]] = {check.__name__: partial(check, WORLD) for check in CUDA_IPC} | {
    check.__name__: check
    for check in (
        what_the_peer_has_computed_is_what_is_read,
        memory_that_cannot_be_exported_is_refused_at_the_start,
        an_owner_waits_until_its_memory_is_closed_elsewhere,
    )
}
