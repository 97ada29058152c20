"""Shared by the worker tests: a cache backend on NumPy arrays, a controller over it, and byte patterns."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from fastdeploy_kvcache_v1.attention.base import AttentionCacheBackend, CacheLayout, RoleSpec, tensor_name
from fastdeploy_kvcache_v1.contract.messages import NO_SWAP_IN, NO_SWAP_OUT, BlockCopies, CacheLevel, SwapStep
from fastdeploy_kvcache_v1.worker.cache_controller import CacheController
from fastdeploy_kvcache_v1.worker.layer_done_counter import LayerDoneCounter
from fastdeploy_kvcache_v1.worker.runtime import Runtime
from fastdeploy_kvcache_v1.worker.slot_set import SlotSet
from tests.worker.chosen_runtime import ChosenRuntime

LIMIT_S = 20.0
"""Longest a test waits for another thread before it is taken for hung. Never asserted on."""


class NumpyBackend(AttentionCacheBackend):
    """Two roles of different sizes, so that a mix-up of offsets cannot go unseen. Needs no paddle."""

    def __init__(self, num_layers: int = 3) -> None:
        self.arrays: list[np.ndarray] = []
        roles = RoleSpec("key", (2, 8), "uint8"), RoleSpec("value", (3, 8), "uint8")
        super().__init__(CacheLayout(num_layers, roles))

    def create_kv_cache(self, num_blocks: int, *, rank: int = 0, device: int = 0) -> dict[str, np.ndarray]:
        caches = {
            tensor_name(role.role, layer, rank, device): np.zeros((num_blocks, *role.block_shape), np.uint8)
            for layer in range(self.layout.num_layers)
            for role in self.layout.roles
        }
        self.arrays = list(caches.values())
        return caches


swap_out = partial(BlockCopies, CacheLevel.DEVICE, CacheLevel.HOST)
swap_in = partial(BlockCopies, CacheLevel.HOST, CacheLevel.DEVICE)
"""Of source slots and target slots."""


class Rig:
    """A controller on NumPy caches, with helpers that write and read blocks behind its back."""

    def __init__(
        self,
        runtime: Runtime | None = None,
        *,
        device: int = 6,
        host: int = 6,
        timeout_s: float = LIMIT_S,
        backend: NumpyBackend | None = None,
        trailer_bytes: int = 0,
    ) -> None:
        self.runtime = runtime = runtime or ChosenRuntime()
        self.backend = backend or NumpyBackend()
        self.layout = self.backend.layout
        self.controller = CacheController(
            self.backend, runtime=runtime, layer_timeout_s=timeout_s, host_trailer_bytes=trailer_bytes
        )
        self.caches = self.controller.initialize_kv_cache(device, host)
        self.arrays = self.backend.arrays
        self.num_device, self.num_host = device, host
        self._step = 0

    def fill(self) -> None:
        """Each block gets a content of its own."""
        for slot in range(self.num_device):
            self.write(slot, 10 + slot)

    def submit(
        self,
        out: BlockCopies = NO_SWAP_OUT,
        into: BlockCopies = NO_SWAP_IN,
        refilled: Sequence[int] = (),
        **options: SlotSet | None,
    ) -> LayerDoneCounter | None:
        self._step += 1
        return self.controller.transfers.submit(SwapStep.of(self._step, out, into, refilled=refilled), **options)

    def write(self, slot: int, content: int, *layers: int) -> None:
        """In these layers, or in all."""
        for row, held in self._rows(slot, content, layers):
            row[:] = held

    def holds(self, slot: int, content: int) -> bool:
        return all((row == held).all() for row, held in self._rows(slot, content))

    def _rows(self, slot: int, content: int, layers: Sequence[int] = ()) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Of each role, with the bytes that `content` has there: all zero for content 0."""
        for number, array in enumerate(self.arrays):
            layer, role = divmod(number, len(self.layout.roles))
            if not layers or layer in layers:
                row = array[slot].reshape(-1)
                word = struct.pack("<IHH", content, layer + 1, role + 1) if content else bytes(8)
                yield row, np.frombuffer(word * (row.size // 8), np.uint8)

    def close(self) -> None:
        self.controller.check()
        self.controller.free()
        self.controller.check()
