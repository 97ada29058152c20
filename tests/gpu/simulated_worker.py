"""A worker whose model knows what every token must read: the real `WorkerCache`, patches and `CudaRuntime` on a GPU.

The model's attention writes the tags of the tokens it computes, and compares what it reads with the tags that must be
there, on the device, in the order of the compute stream. Nothing here waits for the device unless a worker would.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import cupy
import numpy as np
from kernels import kernel
from random_engine import Work
from tensor import Tensor

from fastdeploy_kvcache_v1.attention.gqa import GQACacheBackend
from fastdeploy_kvcache_v1.fastdeploy_integration.worker import patches
from fastdeploy_kvcache_v1.fastdeploy_integration.worker.worker_cache import DRAFT, MAIN, WorkerCache
from fastdeploy_kvcache_v1.metadata import TransferReport
from fastdeploy_kvcache_v1.worker.runtime import CudaRuntime

ROLES, WORDS = 2, 2
"""Cache tensors of a layer, and 8-byte words of one token in each."""


class Attention:
    """One layer; `forward` is what the patches replace."""

    def __init__(self, worker: SimulatedWorker, layer_id: int, number: int) -> None:
        self.worker, self.layer_id, self.number = worker, layer_id, number
        """`layer_id` counts from 0 in the draft model, `number` goes on."""

    def forward(
        self, q: Any, k: Any = None, v: Any = None, qkv: Any = None, compressed: Any = None, pe: Any = None,
        forward_meta: Any = None,
    ) -> None:  # fmt: skip
        work, writes, reads = q
        for role in range(ROLES):
            place = ROLES * self.number + role
            self.worker.launch("attend", self.worker.arrays[place], work[place], writes, reads, self.worker.fault)


class SimulatedWorker:
    """`ahead`: passes that may be submitted while an earlier one runs. `draft`: with a draft model, of two layers.
    `draft_tokens`: speculative tokens per row and pass.
    """

    def __init__(
        self,
        *,
        layers: int,
        device_slots: int,
        host_slots: int,
        block_size: int,
        ahead: int,
        draft: bool,
        draft_tokens: int,
        keep_host_memory: bool,
        tell: Callable[[TransferReport], None],
        seed: int,
    ) -> None:
        self.num_layers, self.device_slots, self.block_size, self.ahead = layers, device_slots, block_size, ahead
        self.parts = (MAIN, DRAFT) if draft else (MAIN,)
        self.random = random.Random(seed)
        self.compute = cupy.cuda.Stream(non_blocking=True)
        with self.compute:
            self.fault = cupy.zeros(4, cupy.int64)
        self._ends: deque[Any] = deque()
        self.runtime = CudaRuntime(compute_handle=self.compute.ptr)
        self.cache = WorkerCache(
            num_host_blocks=host_slots,
            block_size=block_size,
            parts=self.parts,
            make_runtime=lambda: self.runtime,
            keep_host_memory=keep_host_memory,
            tell_copies=tell,
            draft_tokens=draft_tokens,
        )
        patches._worker_cache = self.cache
        config = SimpleNamespace(graph_opt_config=SimpleNamespace(graph_opt_level=0))
        self.runner = SimpleNamespace(fd_config=config, forward_meta=None, enable_overlap_schedule=ahead > 0)
        self.proposer = SimpleNamespace(forward_meta=None)
        self._patched = patches.make_attention_forward(Attention.forward)
        self.make_tensors()

    # ---- tensors

    def make_tensors(self) -> None:
        self.arrays: list[Any] = []
        self.layers = []
        for part in self.parts:
            count = 2 if part == DRAFT else self.num_layers
            layout = GQACacheBackend(count, 1, 4, self.block_size, "float32").layout
            with self.compute:
                made = [
                    cupy.full((self.device_slots, self.block_size, WORDS), -7, cupy.int64) for _ in range(count * ROLES)
                ]
            first = len(self.arrays)
            self.arrays += made
            tensors = {str(first + place): Tensor(array) for place, array in enumerate(made)}
            self.layers += [Attention(self, layer, first // ROLES + layer) for layer in range(count)]
            self.cache.register(part, layout, tensors, self.device_slots)

    def drop_tensors(self) -> None:
        """As for new weights, or to sleep: nobody but the cache waits for anything, and the memory goes."""
        for part in self.parts:
            self.cache.unregister(part)
        self.arrays, self.layers = [], []
        self._ends.clear()

    def close(self) -> None:
        """Give everything back, also the host memory that is kept for tensors to come."""
        for controller in (self.cache._controller, self.cache._idle):
            if controller is not None:
                controller.free()
        self.runtime.close()

    # ---- a step

    def receive(self, tasks: list[Any]) -> None:
        patches.insert_tasks(lambda *_: None, self.runner, (tasks, len(tasks)), {})

    def execute(self, work: Work | None, *, graphs: Sequence[bool], prepares: bool) -> None:
        """One `execute_model`. Without `work` it computes no layer; `prepares` says whether it got ready to.
        `graphs`: whether the main model is replayed as a graph, and the draft model.
        """
        while len(self._ends) > self.ahead:
            self._ends.popleft().synchronize()

        def execute_model() -> None:
            if work is not None or prepares:
                patches.initialize_forward_meta(self._prepare(self.runner, graphs[0]), self.runner, (), {})
            if work is not None:
                self._run_layers(self._uploaded(work), work, graphs)

        patches.execute_model(execute_model, self.runner, (), {})
        self._ends.append(self.compute.record())

    def capture(self) -> None:
        """A dummy pass becomes a graph, while copies may run."""
        nothing = Work()
        with self.compute:
            inputs = cupy.zeros((len(self.arrays), 1), cupy.int64)
        self.compute.begin_capture()
        patches.initialize_forward_meta(self._prepare(self.runner, True), self.runner, (True,), {})
        for layer in self.layers:
            self._patched(layer, (inputs, len(nothing.writes), 0), forward_meta=self.runner.forward_meta)
        with self.compute:
            self.compute.end_capture().launch(self.compute)

    def _prepare(self, owner: Any, graph: bool) -> Callable[..., None]:
        def initialize(*_: Any) -> None:
            owner.forward_meta = SimpleNamespace(step_use_cudagraph=graph)

        return initialize

    def _run_layers(self, uploaded: Any, work: Work, graphs: Sequence[bool]) -> None:
        inputs = uploaded, len(work.writes), len(work.reads)
        for layer in self.layers:
            is_draft = layer.number >= self.num_layers
            owner = self.proposer if is_draft else self.runner
            if layer.number == self.num_layers:
                prepare = self._prepare(self.proposer, graphs[1])
                patches.initialize_draft_forward_meta(prepare, self.proposer, (), {})
            if graphs[is_draft]:  # replayed: no Python of the layer
                layer.forward(inputs, forward_meta=owner.forward_meta)
            else:
                self._patched(layer, inputs, forward_meta=owner.forward_meta)

    def _uploaded(self, work: Work) -> Any:
        """int64 `[layers * roles, 2 * tokens]`: which rows, then which tags."""
        rows = np.array([*work.writes, *work.reads], np.int64).reshape(-1, 3)
        where, places = rows[:, 0] * self.block_size + rows[:, 1], range(len(self.arrays))
        with self.compute:
            return cupy.asarray(np.array([np.concatenate((where, tag_in(rows[:, 2], place))) for place in places]))

    def launch(self, name: str, *arguments: Any) -> None:
        converted = [np.int32(each) if isinstance(each, int) else each for each in arguments]
        with self.compute:
            kernel(name)((1,), (128,), tuple(converted))

    def delay(self, cycles: int) -> None:
        """Hold up one stream."""
        handles = [self.compute.ptr, *(stream.handle for stream in self.runtime._streams if not stream.closed)]
        with cupy.cuda.ExternalStream(self.random.choice(handles)):
            kernel("spin")((1,), (1,), (np.int64(cycles),))

    # ---- what is where

    def found_faults(self) -> list[int]:
        """How many reads were wrong so far; of the first one: token row, tag expected, tag found."""
        with self.compute:
            return [int(each) for each in cupy.asnumpy(self.fault)]

    def on_device(self) -> np.ndarray:
        """int64 `[slots, layers * roles, tokens, words]`, after everything submitted has run."""
        cupy.cuda.Device().synchronize()
        with self.compute:
            return np.stack([cupy.asnumpy(array) for array in self.arrays], axis=1)

    def on_host(self, slot: int) -> np.ndarray:
        """int64 `[layers * roles, tokens, words]` as it is now."""
        assert self.cache._controller is not None
        block = self.cache._controller.host_pool.block(slot)
        return block.view(np.int64).reshape(len(self.arrays), self.block_size, WORDS)

    def fill_on_host(self, slot: int, tags: list[int]) -> None:
        """At once, as a store fills a slot that no copy uses."""
        for place, rows in enumerate(self.on_host(slot)):
            rows[:] = self.rows_of(tags, place)

    def rows_of(self, tags: list[int], place: int) -> np.ndarray:
        """int64 `[tokens, words]`: a block of these tokens in tensor `place`."""
        first = tag_in(np.array(tags, np.int64), place)
        return np.stack((first, ~first), axis=1)

    def holds(self, found: np.ndarray, tags: list[int]) -> bool:
        """Whether `found`, as of one slot, holds the tags of these first tokens in every layer and role."""
        for place, rows in enumerate(found):
            expected = tag_in(np.array(tags, np.int64), place)
            if (rows[: len(tags), 0] != expected).any() or (rows[: len(tags), 1] != ~expected).any():
                return False
        return True

    def check(self) -> None:
        if self.cache._controller is not None:
            self.cache._controller.check()


def tag_in(tags: np.ndarray, place: int) -> np.ndarray:
    """What a token's rows hold in tensor `place`: no two tensors hold the same."""
    return tags * 64 + place
