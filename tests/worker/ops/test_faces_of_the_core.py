"""What is asked of the compiled core and what is made of its answers, where only a GPU could do the rest."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

from fastdeploy_kvcache_v1.errors import CacheStateError, ConfigError, InvariantError, TransferError
from fastdeploy_kvcache_v1.worker import ops
from fastdeploy_kvcache_v1.worker.ops import library
from fastdeploy_kvcache_v1.worker.ops.compiled import CompiledOps, Path
from fastdeploy_kvcache_v1.worker.ops.peer_memory import Allocation, Gpu, PeerMemory


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (library.INVALID, CacheStateError),
        (library.OUT_OF_MEMORY, MemoryError),
        (library.UNAVAILABLE, ConfigError),
        (library.DRIVER, TransferError),
        (library.INTERNAL, InvariantError),
    ],
)
def test_a_code_of_the_core_is_an_error_of_the_package(code, error):
    made = library.Library.__new__(library.Library)
    made.raw = type("Raw", (), {"asked": lambda self: code, "kvswap_last_error": lambda self: b"gone \xff"})()
    with pytest.raises(error, match="gone �"):
        made.call("asked")


@pytest.mark.parametrize(
    ("choice", "is_there", "reason"),
    [
        ("numpy", True, "FASTDEPLOY_KVCACHE_OPS says so"),
        ("", False, "they were not built"),
        ("", True, "of another build"),
    ],
)
def test_without_a_core_there_is_a_reason(monkeypatch, tmp_path, choice, is_there, reason):
    def unfit():
        raise ConfigError("it is of another build")

    monkeypatch.setenv(library.CHOICE, choice)
    monkeypatch.setattr(library, "CORE", tmp_path if is_there else tmp_path / "none")
    monkeypatch.setattr(library, "Library", unfit)
    core, why = library.load()
    assert core is None
    assert reason in why


@pytest.mark.parametrize(("code", "platforms"), [(library.OK, {"cpu", "cuda"}), (library.UNAVAILABLE, {"cpu"})])
def test_the_core_copies_on_a_gpu_where_there_is_a_driver(code, platforms):
    core = CompiledOps(SimpleNamespace(raw=SimpleNamespace(kvswap_cuda_available=lambda: code)))
    assert {platform for _, platform in ops.compiled_implementations(core)} == platforms


class Peers:
    """The core's functions for the memory of other processes: an allocation of 4,096 bytes at 7,000 on GPU 3."""

    def __init__(self):
        self.calls = []

    def call(self, name, *arguments):
        self.calls.append((name.removeprefix("kvswap_cuda_"), arguments[0]))
        getattr(self, name.removeprefix("kvswap_cuda_"))(*arguments)

    def ipc_export(self, address, made):
        made = made._obj
        made.handle[:], made.base, made.num_bytes = b"h" * 64, 7000, 4096

    def ipc_open(self, handle, base):
        assert handle == b"h" * 64
        base._obj.value = 9000

    def ipc_close(self, base):
        pass

    def device_of(self, address, number, uuid):
        number._obj.value, uuid[:] = 3, b"u" * 16

    def reaches(self, number, uuid, access):
        access._obj.value = {b"u" * 16: 1, b"v" * 16: 0}.get(uuid, -1)

    def copy_ranges(self, address, count, path, stream):
        rows = np.ctypeslib.as_array((ctypes.c_int64 * (3 * count)).from_address(address)).reshape(count, 3)
        self.copied = rows.tolist(), path, stream


def test_memory_of_other_processes_is_that_of_the_core():
    peers = Peers()
    memory = PeerMemory(peers)
    allocation = memory.export(7100)
    assert allocation == Allocation(b"h" * 64, 7000, 4096)
    assert memory.open(allocation.handle) == 9000
    with pytest.raises(AssertionError, match="a handle has 64 bytes, got 3"):
        memory.open(b"abc")
    memory.close(9000)
    assert memory.gpu_of(7100) == Gpu(3, b"u" * 16)
    assert [memory.reaches(3, uuid * 16) for uuid in (b"u", b"v", b"w")] == [True, False, None]
    memory.copy(np.array([[7000, 9000, 8], [7008, 9016, 4]]), Path.BATCH, stream=5)
    assert peers.copied == ([[7000, 9000, 8], [7008, 9016, 4]], 4, 5)
    assert peers.calls[:3] == [("ipc_export", 7100), ("ipc_open", b"h" * 64), ("ipc_close", 9000)]
    for wrong in (np.zeros((2, 3), np.int32), np.zeros((2, 6), np.int64)[:, ::2]):
        with pytest.raises(AssertionError):
            memory.copy(wrong, stream=5)
