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
from fastdeploy_kvcache_v1.worker.runtime.placement import (
    allocate_near,
    node_of_pci_device,
    node_of_this_process,
    numa_nodes,
    touch,
)

NODES = {0: frozenset({0, 1}), 1: frozenset({2, 3})}
PAGE = mmap.PAGESIZE


def resident_pages(address: int, nbytes: int) -> int:
    pages = (ctypes.c_ubyte * -(-nbytes // PAGE))()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), pages) == 0, os.strerror(ctypes.get_errno())
    return sum(page & 1 for page in pages)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_every_page_is_there_and_zero(monkeypatch):
    monkeypatch.setattr(placement, "CHUNK", 4 * PAGE)
    nbytes = 30 * PAGE + 1
    untouched = ops.host_alloc(nbytes)
    assert resident_pages(untouched.address, nbytes) == 0
    buffer = allocate_near(nbytes, lambda nodes: None)
    assert resident_pages(buffer.address, nbytes) == 31
    assert not buffer.array.any()


def test_nodes_with_cpus_are_found(tmp_path):
    for node, cpus in (("node0", "0-1,8\n"), ("node1", "2-3\n"), ("node2", "\n"), ("node3", "what\n")):
        write(tmp_path / "devices/system/node" / node / "cpulist", cpus)
    assert numa_nodes(tmp_path) == {0: {0, 1, 8}, 1: {2, 3}}
    assert numa_nodes(tmp_path / "nowhere") == {}


@pytest.mark.parametrize(("allowed", "node"), [({2}, 1), ({0, 1}, 0), ({1, 2}, None), ({7}, None)])
def test_node_of_a_process_that_stays_in_one(monkeypatch, allowed, node):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: allowed)
    assert node_of_this_process(NODES) == node


def test_node_of_a_pci_device(tmp_path):
    devices = tmp_path / "bus/pci/devices"
    write(devices / "0000:af:00.0/numa_node", "1\n")
    write(devices / "0000:b0:00.0/numa_node", "-1\n")
    write(devices / "0000:b1:00.0/numa_node", "0\n")
    assert node_of_pci_device("0000:B1:00.0", tmp_path) == 0
    assert node_of_pci_device("0000:AF:00.0", tmp_path) == 1
    assert node_of_pci_device("0000:B0:00.0", tmp_path) is None
    assert node_of_pci_device("0000:C0:00.0", tmp_path) is None


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


def test_one_node_or_no_choice_pins_nothing(monkeypatch):
    pinned = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cpus: pinned.append(cpus))
    monkeypatch.setattr(placement, "numa_nodes", lambda: NODES)
    allocate_near(4 * PAGE, lambda nodes: None)
    monkeypatch.setattr(placement, "numa_nodes", lambda: {0: frozenset({0, 1})})
    allocate_near(4 * PAGE, lambda nodes: pytest.fail("there is nothing to choose"))
    assert pinned == []


def test_what_the_system_refuses_is_touched_all_the_same(monkeypatch):
    def refuse(thread, cpus):
        raise PermissionError("no")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    monkeypatch.setattr(placement, "numa_nodes", lambda: NODES)
    buffer = allocate_near(4 * PAGE, lambda nodes: 1)
    assert resident_pages(buffer.address, 4 * PAGE) == 4
