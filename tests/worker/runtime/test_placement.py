"""Where the pages of the host tier lie, and that they are there."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from fastdeploy_kvcache_v1.worker import ops
from fastdeploy_kvcache_v1.worker.runtime import placement
from fastdeploy_kvcache_v1.worker.runtime.placement import allocate_near, cpus_near, touch

PAGE = mmap.PAGESIZE


def resident_pages(address: int, nbytes: int) -> int:
    pages = (ctypes.c_ubyte * -(-nbytes // PAGE))()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), pages) == 0, os.strerror(ctypes.get_errno())
    return sum(page & 1 for page in pages)


def test_every_page_is_there_and_zero(monkeypatch):
    monkeypatch.setattr(placement, "CHUNK", 4 * PAGE)
    nbytes = 30 * PAGE + 1
    untouched = ops.host_alloc(nbytes)
    assert resident_pages(untouched.address, nbytes) == 0
    buffer = allocate_near(nbytes)
    assert resident_pages(buffer.address, nbytes) == 31
    assert not buffer.array.any()


@pytest.mark.parametrize(
    ("listed", "cpus"),
    [("0-1,5\n", {0, 1, 5}), ("7\n", {7}), ("0-7\n", set()), ("\n", set()), ("what\n", set()), (None, set())],
)
def test_cpus_near_a_pci_device(tmp_path, monkeypatch, listed, cpus):
    """Where all are near, none is nearer."""
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    device = tmp_path / "bus/pci/devices/0000:af:00.0"
    device.mkdir(parents=True)
    if listed is not None:
        (device / "local_cpulist").write_text(listed)
    assert cpus_near("0000:AF:00.0", tmp_path) == cpus


def test_an_interrupt_does_not_wait_for_all_pages(monkeypatch):
    touched, gate = [], threading.Event()

    class Pool(ThreadPoolExecutor):
        def shutdown(self, wait=True, *, cancel_futures=False):
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            gate.set()
            super().shutdown(wait=wait)

    def touch_and_interrupt(chunk):
        touched.append(chunk)
        if len(touched) == 1:
            raise KeyboardInterrupt
        gate.wait()

    monkeypatch.setattr(placement, "CHUNK", PAGE)
    monkeypatch.setattr(placement, "MAX_THREADS", 1)
    monkeypatch.setattr(placement, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(placement, "_touch", touch_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        touch(np.zeros(50 * PAGE, np.uint8))
    assert len(touched) <= 2
    assert gate.is_set(), "no thread is left"


def test_pages_come_from_the_cpus_that_are_given(monkeypatch):
    pinned = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cpus: pinned.append(cpus))
    allocate_near(4 * PAGE)
    assert pinned == []
    allocate_near(4 * PAGE, frozenset({2, 3}))
    assert pinned == [{2, 3}]


def test_memory_is_touched_although_the_system_refuses_cpu_affinity(monkeypatch):
    def refuse(thread, cpus):
        raise PermissionError("no")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    buffer = allocate_near(4 * PAGE, frozenset({2, 3}))
    assert resident_pages(buffer.address, 4 * PAGE) == 4
