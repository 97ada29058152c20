"""A process that ends while its queue copies."""

import numpy as np

from fastdeploy_kvcache_v1.worker import ops
from fastdeploy_kvcache_v1.worker.ops import BlockRows, CopyRun, CopyRuns
from fastdeploy_kvcache_v1.worker.ops.queues import Queue

queue, target, source = Queue(ops.COMPILED.library, "late"), np.zeros((8, 4 << 20), np.uint8), ops.host_alloc(32 << 20)
rows = [(BlockRows(address, 8, 4 << 20, 4 << 20),) for address in (target.ctypes.data, source.address)]
for _ in range(100):
    ops.COMPILED.swap_cache_per_layer(*rows, CopyRuns.of([CopyRun(0, 0, 8)]), queue.id)
