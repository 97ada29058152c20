"""Slows reads of the `file` store in every Python that has this folder in PYTHONPATH.

`FASTDEPLOY_KVCACHE_BENCH_READ_MB_S` is the most 10^6 bytes per second, for each `get` of a process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from fastdeploy_kvcache_v1.storage.base import StoreKey
from fastdeploy_kvcache_v1.storage.file.file_backend import FileBackend

BYTES_PER_S = 1e6 * float(os.environ["FASTDEPLOY_KVCACHE_BENCH_READ_MB_S"])

_get = FileBackend.get


def _slow_get(self: FileBackend, keys: Sequence[StoreKey], buffers: Sequence[memoryview]) -> int:
    began = time.perf_counter()
    num_read = _get(self, keys, buffers)
    ends = began + sum(buffer.nbytes for buffer in buffers[:num_read]) / BYTES_PER_S
    time.sleep(max(0.0, ends - time.perf_counter()))
    return num_read


FileBackend.get = _slow_get  # type: ignore[method-assign]
