"""Data planes of one process that read each other, for the contract in tests/gpu/plane_contract.py.

Of Mooncake only what moves the bytes is made up, by `Engine`; CUDA is the fake driver.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import sys
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

from fastdeploy_kvcache_v1.transfer import cuda_ipc_plane, mooncake_plane, socket_source
from fastdeploy_kvcache_v1.transfer.cuda_ipc_plane import CudaIpcPlane
from fastdeploy_kvcache_v1.transfer.cuda_ipc_source import CudaIpcSource
from fastdeploy_kvcache_v1.transfer.mooncake_plane import MooncakePlane
from fastdeploy_kvcache_v1.transfer.mooncake_source import MooncakeSource
from fastdeploy_kvcache_v1.transfer.socket_plane import SocketPlane
from tests.gpu.in_process import fake_gpu
from tests.gpu.plane_contract import NUM_BLOCKS, GpuTensors, Ours, Tensors, canaries, content

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


class CudaIpc(Sockets):
    """On the fake GPU. Every plane takes itself for a process of its own."""

    limits = (CudaIpcSource, "most_spans", "most_bytes")
    tensors = GpuTensors

    def __init__(self, monkeypatch):
        super().__init__(monkeypatch)
        self.is_current = False
        """The GPU is the calling thread's, so that CUDA may be asked."""
        self._ends = ExitStack()
        self.gpu = self._ends.enter_context(fake_gpu())
        monkeypatch.setattr(self.gpu, "answer", partial(self._answer, self.gpu.answer))
        monkeypatch.setattr(cuda_ipc_plane, "this_process", lambda: self.process)
        monkeypatch.setattr(cuda_ipc_plane, "READERS_LEAVE_S", 0.05)
        device = sys.modules["cupy"].cuda.Device
        monkeypatch.setattr(device, "use", lambda gpu: setattr(self, "is_current", gpu.id == 0))

    def _answer(self, answer, name, *given):
        is_read = name.startswith("cuMemcpy") and given[-1] != 0
        if not self.is_current and (is_read or name.startswith("cuIpc")):
            return 201, ()
        self.is_current &= name not in ("cuIpcCloseMemHandle", "cuEventRecord")
        return answer(name, *given)

    def copies(self):
        """Those of reads, by their names in the driver's log."""
        return [name for name, stream, *_ in self.gpu.log if stream and name in ("copy", "copy 2D", "batch")]

    def make(self):
        return _Own(self)

    def close(self):
        super().close()
        self._ends.close()


class _Own(CudaIpcPlane):
    def __init__(self, world):
        self.world, self.process = world, os.urandom(8)
        super().__init__()

    def register(self, regions):
        self.world.process = self.process
        super().register(regions)

    def open(self, address, deadline):
        self.world.process = self.process
        self.world.is_current = False
        try:
            return super().open(address, deadline)
        finally:
            self.world.is_current = False
