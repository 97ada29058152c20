"""Checks of one way to copy: every byte, in every pattern, and its order on streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial

import cupy
import numpy as np
from device import device_rows, host_rows, page_locked, runtime
from kernels import kernel

from fastdeploy_kvcache_v1.worker.cuda.rates import KERNEL
from fastdeploy_kvcache_v1.worker.ops import LayerRows, plan_spans
from fastdeploy_kvcache_v1.worker.runtime import Event

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


class Copying:
    """Both directions of copies between the tiers of `memory`, all by one way."""

    def __init__(self, way: str, memory: Tiers) -> None:
        self.memory = memory
        self.compute = cupy.cuda.Stream(non_blocking=True)
        self.runtime = runtime(way, self.compute)
        self.copies = self.runtime.new_copies(memory.device_rows, memory.host_rows)
        self.into, self.out = (self.runtime.new_stream(name) for name in ("in", "out"))

    def submit(self, of: list[int], to: list[int], *, to_device: bool, layer_by_layer: bool = False) -> Event:
        sizes = (self.memory.num_host, self.memory.num_device)
        num_sources, num_targets = sizes if to_device else sizes[::-1]
        spans = plan_spans(of, to, num_sources=num_sources, num_targets=num_targets)
        stream = self.into if to_device else self.out
        stream.begin()
        if layer_by_layer:
            for layer in range(len(self.memory.widths)):
                stream.submit(partial(self.copies.layer, stream, layer, spans, to_device=to_device))
        else:
            stream.submit(partial(self.copies.all_layers, stream, spans, to_device=to_device))
        return stream.record_event()

    def close(self) -> None:
        self.into.close()
        self.out.close()
        self.copies.close()


def copy_and_compare(
    copying: Copying, device: list[int], host: list[int], *, to_host: bool, layer_by_layer: bool = False
) -> None:
    memory = copying.memory
    expected_device, expected_host = memory.on_device(), memory.pool.copy()
    if to_host:
        expected_host[host] = expected_device[device]
        end = copying.submit(device, host, to_device=False, layer_by_layer=layer_by_layer)
    else:
        expected_device[device] = expected_host[host]
        end = copying.submit(host, device, to_device=True, layer_by_layer=layer_by_layer)
    end.wait(60)
    assert (memory.pool == expected_host).all(), "host pool"
    assert (memory.on_device() == expected_device).all(), "device"


def random_copies(way: str) -> None:
    rng = np.random.default_rng(5)
    for number in range(40):
        step = 16 if number % 2 else 1
        roles = int(rng.integers(1, 6))
        widths = [[int(width) * step for width in rng.integers(1, 2000, roles)]] * int(rng.integers(1, 4))
        slots = (int(rng.integers(2, 80)), int(rng.integers(2, 80)))
        with tiers(widths, slots, number) as memory, closing(Copying(way, memory)) as copying:
            for turn in range(2):
                count = int(rng.integers(0, min(slots) + 1))
                device = [int(slot) for slot in rng.permutation(slots[0])[:count]]
                host = [int(slot) for slot in rng.permutation(slots[1])[:count]]
                if number % 3 == 0:
                    device, host = sorted(device), sorted(host)
                to_host = (number + turn) % 2 == 0
                copy_and_compare(copying, device, host, to_host=to_host, layer_by_layer=number % 4 > 1)


def very_many_blocks(way: str) -> None:
    count = 100_000 if way == KERNEL else 10_000  # the others take a call or a descriptor for each
    order = [int(slot) for slot in np.random.default_rng(2).permutation(count)]
    with tiers([[32, 16]], (count, count), 1) as memory, closing(Copying(way, memory)) as copying:
        copy_and_compare(copying, order, list(range(count)), to_host=True)
        copy_and_compare(copying, list(range(count)), order, to_host=False)


def order_is_kept(way: str) -> None:
    """Slow writer on the compute stream; D2H waits for its event; H2D into other slots waits for the D2H's."""
    spin, fill = kernel("spin"), kernel("fill")
    with tiers([[1 << 16, 1 << 16]], (32, 32), 3) as memory, closing(Copying(way, memory)) as copying:
        array = memory.device[0][0]
        with copying.compute:
            spin((1,), (1,), (np.int64(DELAY_CYCLES),))
            fill((64,), (256,), (array, np.int64(array.size), np.int32(0x5A)))
        copying.out.wait_event(copying.runtime.compute_stream.record_event())
        copied = copying.submit([*range(8), 20], [*range(16, 24), 3], to_device=False)
        copying.into.wait_event(copied)
        copying.submit([*range(16, 24)], [*range(24, 32)], to_device=True).wait(60)
        assert (memory.pool[[*range(16, 24), 3], : 1 << 16] == 0x5A).all(), "D2H read before the writer was done"
        assert (cupy.asnumpy(array)[24:] == 0x5A).all(), "H2D read before the D2H was done"


def both_directions_at_once(way: str) -> None:
    """Step after step, without a look in between."""
    rng = np.random.default_rng(6)
    with tiers([[4096, 2048]] * 2, (64, 64), 6) as memory, closing(Copying(way, memory)) as copying:
        expected_device, expected_host = memory.on_device(), memory.pool.copy()
        ends = []
        for turn in range(8):  # each slot is used by one copy
            device, host = ([int(slot) for slot in rng.permutation(8) + 8 * turn] for _ in range(2))
            expected_host[host[:4]] = expected_device[device[:4]]
            expected_device[device[4:]] = expected_host[host[4:]]
            ends.append(copying.submit(device[:4], host[:4], to_device=False))
            ends.append(copying.submit(host[4:], device[4:], to_device=True, layer_by_layer=True))
        for end in ends:
            end.wait(60)
        assert (memory.pool == expected_host).all(), "host pool"
        assert (memory.on_device() == expected_device).all(), "device"


OF_EVERY_WAY: dict[str, Callable[[str], None]] = {
    check.__name__: check for check in (random_copies, very_many_blocks, order_is_kept, both_directions_at_once)
}
