"""FastDeploy's operators for tensors on a GPU, over the fake CUDA runtime; a process of its own, for their names."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import paddle
import pytest

from fastdeploy_kvcache_v1.worker.ops.paddle_ops import OPERATORS

BLOCKS, HOST_BLOCKS = 9, 12
STEPS = "device malloc memcpy memcpy launch free "


def load(library: str) -> ctypes.CDLL:
    """Registers its operators; `fake_page_locked` locks memory that kernels find at another address."""
    paddle.base.core.load_op_meta_info_and_register_op(library)
    gpu = ctypes.CDLL(library)
    gpu.fake_log.restype = ctypes.c_char_p
    return gpu


def state(gpu: ctypes.CDLL) -> tuple[str, int]:
    """What was called, and how much is enqueued."""
    return gpu.fake_log().decode(), gpu.fake_enqueued()


def check_random_copies(gpu: ctypes.CDLL, seed: int) -> None:
    rng = np.random.default_rng(seed)
    operator, mode = OPERATORS[seed % 3], seed // 3 % 2
    widths = rng.choice([16, 48, 100, 33, 4112], 4 if operator == OPERATORS[2] else 1).tolist()
    devices = [rng.integers(0, 256, (BLOCKS, width), np.uint8) for width in widths]
    caches = [paddle.to_tensor(device) for device in devices]
    mapped = rng.integers(0, 256, HOST_BLOCKS * sum(widths), np.uint8)
    host = np.zeros_like(mapped)
    gpu.fake_page_locked(*map(ctypes.c_void_p, (host.ctypes.data, host.nbytes, mapped.ctypes.data)))
    starts = np.cumsum([0, *(HOST_BLOCKS * width for width in widths)])
    count = int(rng.integers(1, BLOCKS + 1))
    on_device, on_host = rng.permutation(BLOCKS)[:count], rng.permutation(HOST_BLOCKS)[:count]
    if rng.integers(2):
        on_device, on_host = np.sort(on_device), np.sort(on_host)
    before = mapped.copy()
    expected = before.copy()
    for device, width, start in zip(devices, widths, starts[:-1], strict=True):
        rows = expected[start : start + HOST_BLOCKS * width].reshape(HOST_BLOCKS, width)
        if mode == 0:
            rows[on_host] = device[on_device]
        else:
            device[on_device] = rows[on_host]

    addresses = (host.ctypes.data + starts[:-1]).tolist()
    first: Any = (caches, addresses) if len(caches) > 1 else (caches[0], addresses[0])
    rest = (HOST_BLOCKS, on_device.tolist(), on_host.tolist(), 0, mode)
    paddle._C_ops._run_custom_op(operator, *first, *rest)
    if operator.endswith("async"):
        assert state(gpu) == (STEPS, 4), seed
        assert (mapped == before).all(), seed
        gpu.fake_run_all()
    else:
        assert state(gpu) == (STEPS + "wait ", 0), seed
    assert (mapped == expected).all(), seed
    assert all((cache.numpy() == device).all() for cache, device in zip(caches, devices, strict=True)), seed
    assert not host.any(), seed


def check_nothing_is_enqueued(gpu: ctypes.CDLL) -> None:
    cache, host = paddle.zeros([4, 16], dtype="uint8"), np.zeros((4, 16), np.uint8)
    paddle._C_ops._run_custom_op(OPERATORS[0], cache, host.ctypes.data, 4, [], [], 0, 1)
    assert state(gpu) == ("", 0)
    with pytest.raises(OSError, match="must be page-locked"):
        paddle._C_ops._run_custom_op(OPERATORS[1], cache, host.ctypes.data, 4, [1], [1], 0, 1)
    assert state(gpu) == ("device ", 0)


def main(library: str) -> None:
    gpu = load(library)
    for seed in range(60):
        check_random_copies(gpu, seed)
    check_nothing_is_enqueued(gpu)
    print("every byte is right")
