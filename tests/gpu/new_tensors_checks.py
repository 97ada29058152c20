"""What is swapped in, or filled from outside, right after cache tensors were made stays: the fill comes before it.

Over the fake GPU, whose streams run in an order that a seed decides; tests/gpu/test_fake_gpu.py runs it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cupy
import fake_gpu
import numpy as np
from cupy import driver
from simulated_worker import SimulatedWorker

from fastdeploy_kvcache_v1.metadata import CacheLevel, CacheSwapMetadata, SwapStep
from fastdeploy_kvcache_v1.worker.hazards import Actor

ORDERS = 40
SLOTS = 8
LIMIT_S = 20.0

SWAPPED, STORED, FETCHED = {3: [11, 12, 13, 14], 5: [21, 22, 23, 24]}, {1: [31, 32, 33, 34]}, {6: [41, 42, 43, 44]}
"""Tags of device slots: what a swap-in, a store's threads and a fetch from a peer fill."""


def worker_of(seed: int) -> SimulatedWorker:
    """Its tensors were made just now: at a first start, or again after a sleep or a weight update."""
    worker = SimulatedWorker(
        layers=3,
        device_slots=SLOTS,
        host_slots=SLOTS,
        block_size=4,
        ahead=0,
        draft=seed % 2 == 0,
        draft_tokens=0,
        keep_host_memory=seed % 3 > 0,
        tell=lambda report: None,
        seed=seed,
    )
    for _ in range(seed % 4):
        cupy.cuda.runtime.deviceSynchronize()
        worker.drop_tensors()
        worker.make_tensors()
    return worker


def swap_in(worker: SimulatedWorker, controller: Any) -> None:
    for host_slot, tags in enumerate(SWAPPED.values()):
        worker.fill_on_host(host_slot, tags)
    copies = CacheSwapMetadata(CacheLevel.HOST, CacheLevel.DEVICE, tuple(range(len(SWAPPED))), tuple(SWAPPED))
    controller.submit_swap_tasks(SwapStep.of(1, copies))


def fill_from_outside(worker: SimulatedWorker, controller: Any) -> None:
    """As a store, which knows no table and asks for late writes; then as a peer's fetch, which asks the table."""
    for event in controller.late_writes(tuple(STORED)):
        assert event.wait_done(LIMIT_S)
    upload(worker, STORED)
    while controller.device_hazards.before(Actor.REMOTE, writes=tuple(FETCHED)):
        driver.library.fake_pump(1)
    upload(worker, FETCHED)


def upload(worker: SimulatedWorker, blocks: dict[int, list[int]]) -> None:
    """On a stream that waits for no other one; the bytes are there on return."""
    stream = cupy.cuda.Stream(non_blocking=True)
    for slot, tags in blocks.items():
        content = np.stack([worker.rows_of(tags, place) for place in range(len(worker.arrays))])
        for array, rows in zip(worker.arrays, content, strict=True):
            to = int(array.data.ptr) + slot * rows.nbytes
            cupy.cuda.runtime.memcpyAsync(to, rows.ctypes.data, rows.nbytes, 1, stream.ptr)
        stream.synchronize()


def lost(directory: Path, seed: int, *, outside_first: bool) -> list[int]:
    """Device slots that do not hold in the end what they were filled with."""
    driver.reset(seed)
    fake_gpu.use_path(directory, fake_gpu.PATHS[seed % len(fake_gpu.PATHS)])
    worker = worker_of(seed)
    controller = worker.cache._controller
    steps = (fill_from_outside, swap_in) if outside_first else (swap_in, fill_from_outside)
    for step in steps:
        driver.library.fake_pump(seed % 5)
        step(worker, controller)
    found, expected = worker.on_device(), {**SWAPPED, **STORED, **FETCHED}
    assert not driver.faults(), driver.faults()
    worker.drop_tensors()
    worker.close()
    return [slot for slot, tags in expected.items() if not worker.holds(found[slot], tags)]


def main(directory: Path) -> int:
    bad = 0
    for outside_first in (False, True):
        wrong = [seed for seed in range(1, ORDERS + 1) if lost(directory, seed, outside_first=outside_first)]
        print(f"outside first: {outside_first}: content was lost in {len(wrong)} of {ORDERS} orders: {wrong}")
        bad += len(wrong)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
