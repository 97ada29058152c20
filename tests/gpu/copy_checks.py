"""Checks of one way to copy: every byte, in every pattern, and its order on streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import cupy
import numpy as np
from device import CUPY, Way, device_rows, host_rows, page_locked
from kernels import kernel

from fastdeploy_kvcache_v1.worker.ops import CopyRun, CopyRuns, LayerRows, plan_runs

DELAY_CYCLES = 100_000_000
"""About 50 ms: whoever does not wait is early for certain."""


class Tiers:
    """Both tiers, poisoned, with what they hold as NumPy arrays."""

    def __init__(self, pool: np.ndarray, widths: list[list[int]], slots: tuple[int, int], seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.widths = widths
        self.num_device, self.num_host = slots
        pool[:] = rng.integers(0, 256, pool.size, dtype=np.uint8)
        self.pool = pool.reshape(self.num_host, -1)
        contents = [
            [rng.integers(0, 256, (self.num_device, width), dtype=np.uint8) for width in roles] for roles in widths
        ]
        self.device = [[cupy.asarray(array) for array in roles] for roles in contents]
        cupy.cuda.Device().synchronize()

    @property
    def device_rows(self) -> list[LayerRows]:
        return [device_rows(roles) for roles in self.device]

    @property
    def host_rows(self) -> list[LayerRows]:
        return host_rows(self.pool, self.num_host, self.widths)

    def on_device(self) -> np.ndarray:
        """All layers and roles of all slots, laid out like the host pool."""
        cupy.cuda.Device().synchronize()
        return np.concatenate([cupy.asnumpy(array) for roles in self.device for array in roles], axis=1)


@contextmanager
def tiers(widths: list[list[int]], slots: tuple[int, int], seed: int) -> Iterator[Tiers]:
    with page_locked(slots[1] * sum(map(sum, widths))) as pool:
        yield Tiers(pool, widths, slots, seed)


def copy_and_compare(
    way: Way, memory: Tiers, device: list[int], host: list[int], *, to_host: bool, layer_by_layer: bool = False
) -> None:
    def copy(targets: list[LayerRows], sources: list[LayerRows], runs: CopyRuns, stream: int) -> None:
        if not layer_by_layer:
            way.all_layers(targets, sources, runs, stream)
            return
        for target, source in zip(targets, sources, strict=True):
            way.per_layer(target, source, runs, stream)

    stream = cupy.cuda.Stream(non_blocking=True)
    expected_device, expected_host = memory.on_device(), memory.pool.copy()
    sizes = (memory.num_device, memory.num_host)
    if to_host:
        expected_host[host] = expected_device[device]
        runs = plan_runs(device, host, num_sources=sizes[0], num_targets=sizes[1])
        copy(memory.host_rows, memory.device_rows, runs, stream.ptr)
    else:
        expected_device[device] = expected_host[host]
        runs = plan_runs(host, device, num_sources=sizes[1], num_targets=sizes[0])
        copy(memory.device_rows, memory.host_rows, runs, stream.ptr)
    stream.synchronize()
    assert (memory.pool == expected_host).all(), "host pool"
    assert (memory.on_device() == expected_device).all(), "device"


def random_copies(name: str, way: Way) -> None:
    rng = np.random.default_rng(5)
    for number in range(40):
        step = 16 if number % 2 else 1
        roles = int(rng.integers(1, 6))
        widths = [[int(width) * step for width in rng.integers(1, 2000, roles)]] * int(rng.integers(1, 4))
        slots = (int(rng.integers(2, 80)), int(rng.integers(2, 80)))
        count = int(rng.integers(0, min(slots) + 1))
        with tiers(widths, slots, number) as memory:
            device = [int(slot) for slot in rng.permutation(slots[0])[:count]]
            host = [int(slot) for slot in rng.permutation(slots[1])[:count]]
            if number % 3 == 0:
                device, host = sorted(device), sorted(host)
            by_layer = number % 4 > 1
            copy_and_compare(way, memory, device, host, to_host=bool(number % 2), layer_by_layer=by_layer)


def very_many_blocks(name: str, way: Way) -> None:
    count = 10_000 if name == CUPY else 100_000  # CuPy takes a call for each
    order = [int(slot) for slot in np.random.default_rng(2).permutation(count)]
    with tiers([[32, 16]], (count, count), 1) as memory:
        copy_and_compare(way, memory, order, list(range(count)), to_host=True)
        copy_and_compare(way, memory, list(range(count)), order, to_host=False)


def order_is_kept(name: str, way: Way) -> None:
    """Slow writer on the compute stream; D2H waits for its event; H2D into other slots waits for the D2H's."""
    compute, out, into = (cupy.cuda.Stream(non_blocking=True) for _ in range(3))
    spin, fill = kernel("spin"), kernel("fill")
    with tiers([[1 << 16, 1 << 16]], (32, 32), 3) as memory:
        array = memory.device[0][0]
        with compute:
            spin((1,), (1,), (np.int64(DELAY_CYCLES),))
            fill((64,), (256,), (array, np.int64(array.size), np.int32(0x5A)))
        written = compute.record()
        out.wait_event(written)
        way.all_layers(
            memory.host_rows, memory.device_rows, CopyRuns.of([CopyRun(0, 16, 8), CopyRun(20, 3, 1)]), out.ptr
        )
        copied = out.record()
        into.wait_event(copied)
        way.all_layers(memory.device_rows, memory.host_rows, CopyRuns.of([CopyRun(16, 24, 8)]), into.ptr)
        returned = into.record()
        returned.synchronize()
        assert (memory.pool[[*range(16, 24), 3], : 1 << 16] == 0x5A).all(), "D2H read before the writer was done"
        assert (cupy.asnumpy(array)[24:] == 0x5A).all(), "H2D read before the D2H was done"


def two_streams_copy_at_once(name: str, way: Way) -> None:
    """What one of them needs on the way, such as staging memory, the other does not spoil."""
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    rng = np.random.default_rng(6)
    with tiers([[4096, 2048]] * 2, (48, 32), 6) as memory:
        expected = memory.on_device()
        for _turn in range(8):
            memory.pool[:] = 0
            chosen = [int(slot) for slot in rng.permutation(48)[:32]]
            for number, stream in enumerate(streams):
                half = range(16 * number, 16 * number + 16)
                runs = plan_runs(chosen[half.start : half.stop], list(half), num_sources=48, num_targets=32)
                way.all_layers(memory.host_rows, memory.device_rows, runs, stream.ptr)
            for stream in streams:
                stream.synchronize()
            assert (memory.pool == expected[chosen]).all(), "one of two copies at once is wrong"


CHECKS: tuple[Callable[[str, Way], Any], ...] = (
    random_copies,
    very_many_blocks,
    order_is_kept,
    two_streams_copy_at_once,
)
