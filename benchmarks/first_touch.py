"""Time of the first copy into host memory, over that into memory whose pages were touched before.
Pages are touched at the start of a worker, so that no request waits for them.
"""

from __future__ import annotations

import time

import numpy as np
from _support import begin, median, sized

from fastdeploy_kvcache_v1.worker import ops
from fastdeploy_kvcache_v1.worker.ops import BlockRows, LayerRows
from fastdeploy_kvcache_v1.worker.ops.copies import CpuCopies
from fastdeploy_kvcache_v1.worker.ops.rows import plan_spans
from fastdeploy_kvcache_v1.worker.runtime.placement import touch

BLOCK = 1 << 20
BLOCKS = sized(512, 4)
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
        },
    )


if __name__ == "__main__":
    main()
