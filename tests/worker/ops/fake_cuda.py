"""The fake driver's state, as `custom_ops/tests/fake_libcuda.h` has it, for programs that run over it."""

from __future__ import annotations

import ctypes


class FakeCuda(ctypes.Structure):
    """What a test tells the driver, and what it tells the test."""

    _fields_ = [
        *((name, ctypes.c_int) for name in ("has_context", "has_batch", "batch_result", "is_pageable")),
        ("kernel_offset", ctypes.c_uint64),
        *((name, ctypes.c_int) for name in ("fail_copy_number", "copies", "copies_2d", "batches")),
        ("largest_batch", ctypes.c_size_t),
        ("registered", ctypes.c_int64),
        ("last_stream", ctypes.c_uint64),
        *((name, ctypes.c_int) for name in ("other_streams", "count_only", "unified_2d")),
        *((name, ctypes.c_int) for name in ("event_waits", "event_records", "calls", "descriptors", "batch_fault")),
    ]


def fake_cuda() -> FakeCuda:
    """Of the `libcuda.so.1` that is first on the path; it must be the fake one."""
    driver = ctypes.CDLL("libcuda.so.1")
    driver.fake_cuda.restype = ctypes.POINTER(FakeCuda)
    return driver.fake_cuda().contents
