"""Data planes of one process that read each other, for the contract in tests/gpu/plane_contract.py.

Of Mooncake and CUDA only what moves the bytes is made up: `Engine` and `GpuMemory` copy memory of this process.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from contextlib import closing, contextmanager
from types import SimpleNamespace
from typing import ClassVar

from fastdeploy_kvcache_v1.errors import TransferError
from fastdeploy_kvcache_v1.transfer import cuda_ipc_plane, cuda_ipc_source, mooncake_plane, socket_source
from fastdeploy_kvcache_v1.transfer.cuda_ipc_plane import CudaIpcPlane
from fastdeploy_kvcache_v1.transfer.cuda_ipc_source import CudaIpcSource
from fastdeploy_kvcache_v1.transfer.mooncake_plane import MooncakePlane
from fastdeploy_kvcache_v1.transfer.mooncake_source import MooncakeSource
from fastdeploy_kvcache_v1.transfer.peer_memory import Allocation, Gpu
from fastdeploy_kvcache_v1.transfer.socket_plane import SocketPlane
from fastdeploy_kvcache_v1.worker.runtime.cpu import CpuEvent, InlineStream
from tests.gpu.plane_contract import NUM_BLOCKS, Ours, Tensors, canaries, content

HOST, SECRET = "127.0.0.1", b"sixteen bytes or more"


class Theirs:
    """A peer: all of its blocks may be read under the lease `all`."""

    def __init__(self, plane, tensors):
        self.plane, self.tensors = plane, tensors
        plane.register(tensors.rows())
        plane.grant("all", range(NUM_BLOCKS))
        self.address = plane.address()

    def ask(self, name, *_):
        assert name == "leave"
        self.plane.close()


class Sockets:
    """Connections of the loopback interface."""

    limits = (socket_source, "MOST_SPANS", "MOST_BYTES")
    tensors = Tensors

    def __init__(self, monkeypatch):
        self._shared = None

    def make(self):
        return SocketPlane(HOST, SECRET, checksums=True)

    @contextmanager
    def ours(self):
        made = Ours(self.make(), self.tensors(canaries()))
        with closing(made.plane):
            yield made

    def peer(self):
        if self._shared is None:
            self._shared = Theirs(self.make(), self.tensors(content(1)))
        return self._shared

    @contextmanager
    def own_peer(self):
        made = Theirs(self.make(), self.tensors(content(3)))
        with closing(made.plane):
            yield made

    def close(self):
        if self._shared is not None:
            self._shared.plane.close()


class Engine:
    """`mooncake.engine.TransferEngine`."""

    sessions: ClassVar = {}
    ports = itertools.count(1)
    refuses = None
    """The call that fails."""

    def initialize(self, host, metadata, protocol, device):
        self.session = f"{host}:{next(self.ports)}"
        self.started_as = (host, metadata, protocol, device)
        self.registered = []
        Engine.sessions[self.session] = self
        return int(Engine.refuses == "initialize")

    def register_memory(self, address, num_bytes):
        self.registered.append((address, num_bytes))
        return int(Engine.refuses == "register_memory")

    def get_rpc_port(self):
        return int(self.session.rpartition(":")[2])

    def batch_transfer_sync_read(self, session, ours, theirs, counts):
        peer = Engine.sessions.get(session)
        if peer is None or len(counts) > 2048:
            return -1
        for to, of, count in zip(ours, theirs, counts, strict=True):
            assert self.has(to, count)
            assert peer.has(of, count)
            ctypes.memmove(to, of, count)
        return 0

    def has(self, address, count):
        """Registered, if in several parts."""
        while count:
            begin, size = next(each for each in self.registered if each[0] <= address < sum(each))
            part = min(count, begin + size - address)
            address, count = address + part, count - part
        return True


class Mooncake(Sockets):
    limits = (MooncakeSource, "most_spans", "most_bytes")

    def __init__(self, monkeypatch):
        super().__init__(monkeypatch)
        self.version = "0.3.13"
        monkeypatch.setattr(mooncake_plane.importlib.metadata, "version", lambda package: self.version)
        monkeypatch.setattr(mooncake_plane.importlib, "import_module", lambda _: SimpleNamespace(TransferEngine=Engine))
        monkeypatch.setattr(Engine, "refuses", None)

    def make(self):
        return MooncakePlane(HOST)

    @contextmanager
    def own_peer(self):
        with super().own_peer() as made:
            yield made
            Engine.sessions.pop(made.plane._serving.session if made.plane._serving else None, None)


class GpuTensors(Tensors):
    on_gpu = True


class GpuMemory:
    """`PeerMemory` of one GPU: a handle is where the allocation begins."""

    uuid = b"\1" * 16
    can_reach: bool | None = True

    def __init__(self):
        self.allocations = {}
        self.mapped = []
        self.is_current = False
        """The GPU is the calling thread's, so that CUDA may be asked."""
        self.copied = 0
        self.fails = None

    def hold(self, tensors):
        for array in (tensors.pool, tensors.alone):
            self.allocations[array.ctypes.data] = array
        return tensors

    def gpu_of(self, address):
        return Gpu(0, self.uuid)

    def reaches(self, number, uuid):
        return self.can_reach

    def export(self, address):
        assert self.is_current
        base, array = next(each for each in self.allocations.items() if 0 <= address - each[0] < each[1].nbytes)
        return Allocation(base.to_bytes(64, "little"), base, array.nbytes)

    def open(self, handle):
        assert self.is_current
        base = int.from_bytes(handle, "little")
        if base not in self.allocations:
            raise TransferError("CUDA error 1")
        self.mapped.append(base)
        return base

    def close(self, base):
        assert self.is_current
        self.is_current = False
        self.mapped.remove(base)
        if self.fails == "close":
            raise TransferError("CUDA error 4")

    def copy(self, stream, ranges, *, by_batch):
        assert self.is_current
        self.is_current = False
        self.copied += 1
        self.by_batch = by_batch
        if self.fails == "copy":
            raise TransferError("CUDA error 700")
        for of, to, count in ranges.tolist():
            ctypes.memmove(to, of, count)


class GpuStream(InlineStream):
    """A copy that fails is told by its event, as on a GPU."""

    def begin(self):
        self.failure = None

    def submit(self, copy, *args):
        try:
            copy(*args)
        except TransferError as error:
            self.failure = error

    def record_event(self, *, timed=False):
        event = CpuEvent()
        event.finish(self.failure)
        return event


class CudaIpc(Sockets):
    """Every plane takes itself for a process of its own."""

    limits = (CudaIpcSource, "most_spans", "most_bytes")

    def __init__(self, monkeypatch):
        super().__init__(monkeypatch)
        self.memory = GpuMemory()
        monkeypatch.setattr(cuda_ipc_plane, "_load", lambda: self.memory)
        monkeypatch.setattr(cuda_ipc_plane, "stream_on", lambda gpu, name: GpuStream(name))
        monkeypatch.setattr(cuda_ipc_plane, "this_process", lambda: self.process)
        monkeypatch.setattr(cuda_ipc_plane, "READERS_LEAVE_S", 0.05)
        for module in (cuda_ipc_plane, cuda_ipc_source):
            monkeypatch.setattr(module, "use_device", lambda gpu: setattr(self.memory, "is_current", gpu == 0))

    def make(self):
        return _Own(self)

    def tensors(self, arrays):
        return self.memory.hold(GpuTensors(arrays))


class _Own(CudaIpcPlane):
    def __init__(self, world):
        self.world, self.process = world, os.urandom(8)
        super().__init__()

    def register(self, regions):
        self.world.process = self.process
        super().register(regions)

    def open(self, address, deadline):
        self.world.process = self.process
        self.world.memory.is_current = False
        try:
            return super().open(address, deadline)
        finally:
            self.world.memory.is_current = False
