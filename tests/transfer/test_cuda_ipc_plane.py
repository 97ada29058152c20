"""CudaIpcPlane over the fake GPU of this process; what it says where there is no GPU.

tests/gpu/test_dry_run.py runs the checks of `scripts/test-gpu` between two processes (`ipc_checks.py`).
Nothing here shows that CUDA does what its documentation says.
"""

from __future__ import annotations

import os
import time
from contextlib import closing

import msgspec
import pytest

from fastdeploy_kvcache_v1.errors import CacheStateError, ConfigError, PeerRefusedError, RemoteReadError
from fastdeploy_kvcache_v1.transfer import cuda_ipc_plane
from fastdeploy_kvcache_v1.transfer.cuda_ipc_plane import CudaIpcPlane
from fastdeploy_kvcache_v1.transfer.peer_memory import Gpu, PeerMemory
from fastdeploy_kvcache_v1.worker.cuda import trial
from fastdeploy_kvcache_v1.worker.cuda.driver import Driver
from fastdeploy_kvcache_v1.worker.cuda.rates import Rates
from tests.gpu.plane_contract import WIDTHS, canaries, everything, soon, whole_blocks
from tests.transfer.planes import CudaIpc

KIND = CudaIpc


@pytest.mark.parametrize(("reaches", "is_refused"), [(True, False), (None, False), (False, True)])
def test_a_gpu_without_peer_access_is_refused(world, mine, monkeypatch, reaches, is_refused):
    """One that is not seen may be reached all the same."""
    monkeypatch.setattr(mine.plane._memory, "reaches", lambda number, uuid: reaches)
    if is_refused:
        with pytest.raises(PeerRefusedError, match=r"GPU-0101.* does not reach the memory of GPU-0101"):
            mine.open(world.peer())
    else:
        mine.open(world.peer()).close()
    assert world.gpu._mapped == {}


def test_what_was_mapped_before_a_refusal_is_given_back_and_its_owner_left(world, mine):
    with world.own_peer() as peer:
        fields = msgspec.msgpack.decode(peer.address)
        fields[5][1][0] = bytes(64)
        peer.address = msgspec.msgpack.encode(fields)
        with pytest.raises(PeerRefusedError, match=r"cannot be mapped on GPU-.*CUDA error 1"):
            mine.open(peer)
        assert world.gpu._mapped == {}
        assert peer.plane._presence.close(0)
        peer.plane._presence = None


def test_a_copy_that_fails_is_an_error_and_gives_everything_back(world, mine):
    source = mine.open(world.peer())
    assert len(world.gpu._mapped) == 2
    world.gpu.statuses["cuMemcpyAsync"] = 700
    with pytest.raises(RemoteReadError, match="CUDA error 700"):
        source.read("any", everything(), soon())
    assert world.gpu._mapped == {}
    world.gpu.statuses.clear()
    with closing(mine.open(world.peer())) as other:
        other.read("any", everything(), soon())


def test_memory_that_cannot_be_given_back_keeps_nobody_waiting(world, mine):
    with world.own_peer() as peer:
        source = mine.open(peer)
        world.gpu.statuses["cuIpcCloseMemHandle"] = 4
        source.close()
        assert peer.plane._presence.close(0)
        peer.plane._presence = None


def test_peer_that_dies_under_a_copy_fails_the_read_and_is_not_read_again(world, mine, monkeypatch):
    with world.own_peer() as peer:
        source, copy = mine.open(peer), mine.plane._memory.copy

        def dies(*given, **way):
            copy(*given, **way)
            peer.plane.close()

        monkeypatch.setattr(mine.plane._memory, "copy", dies)
        with pytest.raises(RemoteReadError, match="has ended"):
            source.read("any", whole_blocks([1], [1]), soon())
    copied = world.copies()
    with pytest.raises(RemoteReadError, match="has ended"):
        source.read("any", whole_blocks([1], [1]), soon())
    assert world.copies() == copied != []


def test_a_read_that_is_late_or_unwanted_ends_when_its_copy_has_run(world, mine, monkeypatch):
    for event in ("late", "closed"):
        source = mine.open(world.peer())
        synchronize, done = source._stream.synchronize, []

        class Slow:
            error = None

            def wait_done(self, timeout, event=event, source=source):
                assert 0 <= timeout <= 0.02
                if event == "closed":
                    source._is_closing = True
                return False

        monkeypatch.setattr(source._stream, "record_event", Slow)
        monkeypatch.setattr(source._stream, "synchronize", lambda end=synchronize, done=done: done.append(end()))
        with pytest.raises(RemoteReadError, match={"late": "in time", "closed": "was closed"}[event]):
            source.read("any", everything(), time.monotonic() + (0.05 if event == "late" else 60))
        assert len(done) == 1
        assert (world.gpu._mapped, world.gpu.faults) == ({}, [])


@pytest.mark.parametrize(("way", "copies"), [("spans", {"copy", "copy 2D"}), ("batch", {"batch"})])
def test_copies_go_by_batches_once_these_were_tried(world, mine, monkeypatch, way, copies):
    monkeypatch.setattr(trial, "known", lambda: Rates({way: {}}))
    with closing(mine.open(world.peer())) as source:
        source.read("any", everything(), soon())
    assert {*world.copies()} == copies


def test_tensors_that_cannot_be_shared_are_refused_at_the_start(world, monkeypatch):
    def refused(reason, error=ConfigError):
        with closing(world.make()) as plane, pytest.raises(error, match=reason):
            plane.register(tensors.rows())

    tensors, range_of = world.tensors(canaries()), world.gpu.cuMemGetAddressRange
    with monkeypatch.context() as patch:
        patch.setattr(world.gpu, "cuMemGetAddressRange", lambda address: (range_of(address)[0], WIDTHS[0]))
        refused("goes beyond its allocation", CacheStateError)
    with monkeypatch.context() as patch:
        patch.setitem(world.gpu.statuses, "cuIpcGetMemHandle", 1)
        refused(r"cannot be shared with another process .*CUDA error 1\): it must come from cudaMalloc")
    with monkeypatch.context() as patch:
        patch.setattr(PeerMemory, "gpu_of", lambda memory, address: Gpu(address, b""))
        refused("got tensors of 4")
    with monkeypatch.context() as patch:
        patch.setattr(cuda_ipc_plane, "Presence", lambda: os.listdir("/no/such/file"))
        refused("cannot lock a file")
    tensors.on_gpu = False
    refused("needs a GPU: these tensors are in CPU memory")


def test_without_a_gpu_it_is_refused_in_one_line(monkeypatch):
    def find(name):
        raise ConfigError("there is no CUDA driver")

    monkeypatch.setattr(cuda_ipc_plane, "driver", lambda: Driver(find))
    with pytest.raises(ConfigError, match=r"^cuda_ipc needs a GPU: there is no CUDA driver"):
        CudaIpcPlane()
