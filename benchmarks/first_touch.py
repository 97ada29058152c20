"""Time of the first copy into host memory, over that into memory whose pages were touched before.
The same of the first load by a store process, which maps memory that the ranks have touched.

Pages are touched at the start of a worker, and mapped at that of a store process, so that no request waits for them.
"""

from __future__ import annotations

import mmap
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from _support import begin, median, sized
from storage import keys_of, new_backend

from fastdeploy_kvcache_v1.storage.base import SlotMemory
from fastdeploy_kvcache_v1.storage.file.file_backend import FileBackend
from fastdeploy_kvcache_v1.storage.host_slots import map_pages
from fastdeploy_kvcache_v1.worker import ops
from fastdeploy_kvcache_v1.worker.ops import BlockRows, LayerRows
from fastdeploy_kvcache_v1.worker.ops.copies import CpuCopies
from fastdeploy_kvcache_v1.worker.ops.rows import plan_spans
from fastdeploy_kvcache_v1.worker.runtime.placement import touch

BLOCK = 1 << 20
BLOCKS = sized(512, 4)
LOADED = sized(64, 4)
"""Blocks of a load."""

TURNS = sized(15, 1)


def one_turn(source: LayerRows, *, touched: bool) -> tuple[float, float]:
    """Milliseconds to touch new memory, and of the first copy into it."""
    spans = plan_spans(range(BLOCKS), range(BLOCKS), num_sources=BLOCKS, num_targets=BLOCKS)
    memory = ops.host_alloc(BLOCKS * BLOCK)
    times = [time.perf_counter()]
    if touched:
        touch(memory.array)
    times.append(time.perf_counter())
    host = LayerRows([BlockRows(memory.address, BLOCKS, BLOCK, BLOCK, owner=memory.array)])
    CpuCopies([source], [host]).all_layers(None, spans, to_device=False)
    times.append(time.perf_counter())
    touch_s, copy_s = np.diff(times).tolist()
    return 1e3 * touch_s, 1e3 * copy_s


def one_load(store: FileBackend, file: int, *, mapped: bool) -> tuple[float, float]:
    """Milliseconds to map slots that another process has touched, and of the first load into them."""
    view = memoryview(mmap.mmap(file, LOADED * BLOCK))
    times = [time.perf_counter()]
    if mapped:
        thread = threading.Thread(target=map_pages, args=([SlotMemory(view, BLOCK)],))
        thread.start()
        thread.join()
    times.append(time.perf_counter())
    assert store.get(keys_of(0, LOADED), [view[slot * BLOCK : (slot + 1) * BLOCK] for slot in range(LOADED)]) == LOADED
    times.append(time.perf_counter())
    map_s, load_s = np.diff(times).tolist()
    return 1e3 * map_s, 1e3 * load_s


def loads() -> dict[str, float]:
    memory = ops.host_alloc(LOADED * BLOCK, shared=True)
    touch(memory.array)
    assert memory.file is not None
    with tempfile.TemporaryDirectory() as directory:
        store = new_backend(Path(directory))
        store.put(keys_of(0, LOADED), [memoryview(bytes(BLOCK))] * LOADED)
        turns = [
            (one_load(store, memory.file, mapped=False)[1], *one_load(store, memory.file, mapped=True))
            for _ in range(TURNS)
        ]
        store.close()
    memory.free()
    return {
        "bytes": LOADED * BLOCK,
        "load_with_first_use_ms": median(first for first, _, _ in turns),
        "load_ms": median(load for _, _, load in turns),
        "map_ms": median(mapping for _, mapping, _ in turns),
        "median_ratio": median(first / load for first, _, load in turns),
    }


def main() -> None:
    run = begin()
    device = np.ones((BLOCKS, BLOCK), np.uint8)
    source = LayerRows([BlockRows(device.ctypes.data, BLOCKS, BLOCK, BLOCK, owner=device)])
    turns = [(one_turn(source, touched=False)[1], *one_turn(source, touched=True)) for _ in range(TURNS)]
    run.save(
        {
            "bytes": BLOCK * BLOCKS,
            "turns": TURNS,
            "copy_with_first_touch_ms": median(untouched for untouched, _, _ in turns),
            "copy_ms": median(copy for _, _, copy in turns),
            "touch_ms": median(touching for _, touching, _ in turns),
            "ratios": sorted(untouched / copy for untouched, _, copy in turns),
            "median_ratio": median(untouched / copy for untouched, _, copy in turns),
            "loads": loads(),
        },
    )


if __name__ == "__main__":
    main()
