"""Checks of the worker half on a GPU: `CudaRuntime`, events, `CacheController`, hazards, `LayerDoneCounter`, pools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import cupy
import numpy as np
from device import runtime
from kernels import kernel
from plane_contract import expect
from tensor import Tensor

from fastdeploy_kvcache_v1.attention.base import AttentionCacheBackend, CacheLayout, RoleSpec
from fastdeploy_kvcache_v1.contract.messages import BlockCopies, CacheLevel, SwapStep
from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.worker.cache_controller import CacheController
from fastdeploy_kvcache_v1.worker.cuda.rates import KERNEL
from fastdeploy_kvcache_v1.worker.host_pool import HostPool
from fastdeploy_kvcache_v1.worker.runtime.base import free_host_memory
from fastdeploy_kvcache_v1.worker.slot_set import slot_set

DELAY_CYCLES = 20_000_000
"""About 10 ms: whoever does not wait is early for certain."""

MOST_POOL_BYTES = 8 << 30
SWAP_OUT, SWAP_IN = (CacheLevel.DEVICE, CacheLevel.HOST), (CacheLevel.HOST, CacheLevel.DEVICE)


class CupyBackend(AttentionCacheBackend):
    """Cache tensors of any layout, uint8 `[blocks, bytes]`."""

    def create_kv_cache(self, num_blocks: int, *, rank: int = 0, device: int = 0) -> dict[str, Tensor]:
        roles = [(layer, role) for layer in range(self.layout.num_layers) for role in self.layout.roles]
        made = {
            f"{role.role}_{layer}": Tensor(cupy.zeros((num_blocks, role.block_bytes), cupy.uint8))
            for layer, role in roles
        }
        cupy.cuda.Device().synchronize()
        return made


class Rig:
    """A controller with caches of three layers with two roles; every byte of a block is its value."""

    def __init__(self, way: str = KERNEL, *, device: int = 6, host: int = 6, compute: Any = None) -> None:
        self.compute = cupy.cuda.Stream(non_blocking=True) if compute is None else compute
        self.runtime = runtime(way, self.compute)
        layout = CacheLayout(3, (RoleSpec("key", (1 << 14,), "uint8"), RoleSpec("value", (1 << 13,), "uint8")))
        self.controller = CacheController(CupyBackend(layout), runtime=self.runtime)
        self.tensors = [tensor.array for tensor in self.controller.initialize_kv_cache(device, host)]
        self.controller.host_pool.buffer.array[:] = 0
        self.num_layers, self._step = layout.num_layers, 0

    def submit(self, *copies: tuple[tuple[CacheLevel, CacheLevel], Sequence[int], Sequence[int]], **more: Any) -> Any:
        self._step += 1
        metadata = [BlockCopies(*kind, tuple(of), tuple(to)) for kind, of, to in copies]
        return self.controller.transfers.submit(SwapStep.of(self._step, *metadata), **more)

    def delay(self) -> None:
        """Hold the compute stream up."""
        with self.compute:
            kernel("spin")((1,), (1,), (np.int64(DELAY_CYCLES),))

    def fill(self, slot: int, value: int, layer: int | None = None) -> None:
        """On the compute stream; every layer, unless one is named."""
        roles = len(self.tensors) // self.num_layers
        tensors = self.tensors if layer is None else self.tensors[layer * roles : (layer + 1) * roles]
        with self.compute:
            for tensor in tensors:
                row = tensor[slot]
                kernel("fill")((8,), (128,), (row, np.int64(row.size), np.int32(value)))

    def on_host(self, slot: int) -> set[int]:
        return set(np.unique(self.controller.host_pool.slot(slot)).tolist())

    def on_device(self, slot: int) -> set[int]:
        """Read on the compute stream: after what compute waits for, and nothing else."""
        with self.compute:
            return {value for tensor in self.tensors for value in np.unique(cupy.asnumpy(tensor[slot])).tolist()}

    def close(self) -> None:
        self.controller.transfers.drain(60)
        self.controller.check()
        self.controller.free()


def events_order_streams_and_tell_time() -> None:
    """Also where compute runs on a stream of somebody else, blocking or not."""
    for non_blocking in (True, False):
        with closing(Rig(compute=cupy.cuda.Stream(non_blocking=non_blocking))) as one:
            other, array = one.runtime.new_stream("other"), one.tensors[0]
            before = one.runtime.compute_stream.record_event(timed=True)
            one.delay()
            one.fill(0, 7)
            after = one.runtime.compute_stream.record_event(timed=True)
            other.wait_event(after)
            target = one.controller.host_pool.slot(0)
            other.submit(cupy.cuda.runtime.memcpyAsync, target.ctypes.data, array.data.ptr, 8, 2, other.handle)
            copied = other.record_event()
            assert copied.wait_done(60)
            assert set(target[:8].tolist()) == {7}, "the copy did not wait"
            assert before.done()
            assert after.done()
            assert after.error is None
            assert after.seconds_since(before) > 0


def layers_are_waited_for_one_by_one(way: str) -> None:
    """Compute reads each layer right after it waited for that one; every copy is held up."""
    with closing(Rig(way)) as one:
        seen = cupy.zeros((one.num_layers, 3, 16), cupy.uint8)
        cupy.cuda.Device().synchronize()
        for slot in range(3):
            one.controller.host_pool.slot(slot)[:] = 10 + slot
        one.controller.transfers.before_compute((), (3,))
        one.delay()
        one.fill(3, 1)
        one.controller.transfers.after_compute((), (3,))
        copies = one.controller.transfers._copies
        inner = copies.layer

        def held_up(stream: Any, *given: Any, **more: Any) -> None:
            with cupy.cuda.ExternalStream(stream.handle):
                for _part in range(10):
                    kernel("spin")((1,), (1,), (np.int64(DELAY_CYCLES // 10),))
            inner(stream, *given, **more)

        copies.layer = held_up
        counter = one.submit((SWAP_IN, (0, 1, 2), (3, 4, 5)))  # into 3 only after compute wrote it
        one.controller.transfers.before_compute((3, 4, 5), (), counter=counter)
        for layer in range(one.num_layers):
            counter.wait_for_layer(layer)
            for place, slot in enumerate((3, 4, 5)):
                source = one.tensors[2 * layer][slot].data.ptr
                cupy.cuda.runtime.memcpyAsync(seen[layer][place].data.ptr, source, 16, 3, one.compute.ptr)
        one.controller.transfers.after_compute((3, 4, 5), ())
        with one.compute:
            found = cupy.asnumpy(seen)
        assert (found == np.array([10, 11, 12], np.uint8)[None, :, None]).all(), found[:, :, 0]


def a_slot_is_reused_only_after_its_last_use(way: str) -> None:
    """Eviction reads, then compute or a swap-in overwrites; compute writes, then an eviction reads."""
    for overwritten in (None, slot_set((0, 1))):
        with closing(Rig(way)) as one:
            one.controller.transfers.before_compute((), (0, 1))
            one.delay()
            for slot in (0, 1):
                one.fill(slot, 20 + slot)
            one.controller.transfers.after_compute((), (0, 1))
            one.submit((SWAP_OUT, (0, 1), (2, 3)), (SWAP_IN, (4,), (1,)), overwritten=overwritten)
            one.controller.transfers.before_compute((1,), (0,))
            one.fill(0, 30)
            one.controller.transfers.after_compute((1,), (0,))
            counter = one.submit((SWAP_IN, (2, 3), (4, 5)))
            one.controller.transfers.before_compute((0, 1, 4, 5), (), counter=counter)
            counter.wait_all()
            found = [one.on_device(slot) for slot in (0, 1, 4, 5)]
            one.controller.transfers.after_compute((0, 1, 4, 5), ())
            assert found == [{30}, {0}, {20}, {21}], found
            assert [one.on_host(slot) for slot in (2, 3)] == [{20}, {21}]
            results = one.controller.transfers.take_results()
            assert all(result.ok and result.seconds >= 0 for result in results)
            assert sum(result.num_blocks for result in results) == 5


def what_does_not_fit_is_refused() -> None:
    with closing(Rig()) as one:
        for sizes in ({"device_bytes": 1 << 60, "host_bytes": 0}, {"device_bytes": 0, "host_bytes": 1 << 60}):
            expect(ConfigError, "", partial(one.runtime.require_memory, **sizes))
        registered = one.controller.host_pool.buffer
        register = cupy.cuda.runtime.hostRegister
        expect(cupy.cuda.runtime.CUDARuntimeError, "", register, registered.address, registered.nbytes, 0)


def pools_of_gibibytes_are_reached_to_their_last_byte(way: str) -> None:
    """Offsets of blocks beyond 4 GiB, where the machine has that much."""
    block = 1 << 20
    compute = cupy.cuda.Stream(non_blocking=True)
    made = runtime(way, compute)
    free, _total = cupy.cuda.runtime.memGetInfo()
    nbytes = min(MOST_POOL_BYTES, int(free) // 4, free_host_memory() // 4)
    layout = CacheLayout(2, (RoleSpec("key", (block // 4,), "uint8"), RoleSpec("value", (block // 4,), "uint8")))
    slots = [0, 1, nbytes // block // 2, nbytes // block - 1]
    controller = CacheController(CupyBackend(layout), runtime=made)
    for _turn in range(2):  # the memory can be had again
        tensors = [tensor.array for tensor in controller.initialize_kv_cache(8, nbytes // block)]
        expected = np.random.default_rng(1).integers(0, 256, (len(slots), block), dtype=np.uint8)
        pool = controller.host_pool
        assert isinstance(pool, HostPool)
        for slot, row in zip(slots, expected, strict=True):
            pool.slot(slot)[:] = row
        into = BlockCopies(*SWAP_IN, tuple(slots), (1, 3, 5, 7))
        out = BlockCopies(*SWAP_OUT, (1, 3, 5, 7), tuple(reversed(slots)))
        controller.transfers.submit(SwapStep.of(0, into))
        controller.transfers.submit(SwapStep.of(1, out))
        controller.transfers.drain(60)
        cupy.cuda.Device().synchronize()
        on_device = np.concatenate([cupy.asnumpy(tensor) for tensor in tensors], axis=1)[[1, 3, 5, 7]]
        assert (on_device == expected).all(), "device"
        for slot, row in zip(reversed(slots), expected, strict=True):
            assert (pool.slot(slot) == row).all(), f"host block {slot} of {nbytes // block}"
        del pool
        controller.free()
    print(f"        a pool of {nbytes / (1 << 30):.2f} GiB")


OF_EVERY_WAY: dict[str, Callable[[str], None]] = {
    check.__name__: check
    for check in (
        layers_are_waited_for_one_by_one,
        a_slot_is_reused_only_after_its_last_use,
        pools_of_gibibytes_are_reached_to_their_last_byte,
    )
}
CHECKS: dict[str, Callable[[], None]] = {
    check.__name__: check
    for check in (
        events_order_streams_and_tell_time,
        what_does_not_fit_is_refused,
    )
}
