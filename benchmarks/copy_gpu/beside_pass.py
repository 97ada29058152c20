"""A model's pass beside copies of its cache on a GPU, by every copy path: what either of them loses.

A layer is two products of float16 matrices. Its cache has the rows of a model with 8 KV heads, and goes through the
worker's own controller: a pass waits for its swap-in layer by layer. There is no attention. Milliseconds are those of
the GPU. Where a pass waits for copies the clock starts before they are submitted, else behind that.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from functools import cache
from statistics import median
from typing import Any, NamedTuple

import cupy
import numpy as np
from cupy import cublas  # noqa: F401  without it this group is left out
from device import runtime
from worker_checks import SWAP_IN, SWAP_OUT, CupyBackend

from fastdeploy_kvcache_v1.attention.base import CacheLayout, RoleSpec
from fastdeploy_kvcache_v1.contract.messages import BlockCopies, SwapStep
from fastdeploy_kvcache_v1.worker.cache_controller import CacheController
from fastdeploy_kvcache_v1.worker.slot_set import slot_set

IS_QUICK = "FASTDEPLOY_KVCACHE_BENCH_QUICK" in os.environ
LAYERS, WIDTH, INNER = (3, 16, 32) if IS_QUICK else (32, 4096, 14336)
ROW_BYTES = (16 << 10, 128 << 10)
"""A block of 64 tokens, keys or values: a head of 128 numbers, and 8 heads."""
COPIED_BYTES = 1 << (18 if IS_QUICK else 24)
"""Of each layer's keys, and of its values: 1 GiB in all."""
PREFILL, DECODE = (4, 2) if IS_QUICK else (2048, 64)
"""Tokens of a pass. A prefill of so many takes about as long as the copy."""
DECODE_PASSES = 10
TURNS = 5


class Times(NamedTuple):
    compute_ms: float
    copies_ms: float


class Case(NamedTuple):
    name: str
    tokens: int
    passes: int
    kind: Any
    """Of the copies."""
    by_layer: bool
    row_bytes: int

    @property
    def waits(self) -> bool:
        return self.kind is SWAP_IN

    def __call__(self, way: str) -> dict[str, float]:
        """Both alone, and together: in turns, so that a change of the GPU's clock meets all three."""
        alone = self._replace(kind=None)
        with closing(Model(way, self.row_bytes)) as model:
            turns = [(model.times(alone), model.times(self._replace(passes=0)), model.times(self))
                     for _turn in range(TURNS + 1)][1:]  # fmt: skip
        compute_ms, _nothing, both_ms = (median(turn[part].compute_ms for turn in turns) for part in range(3))
        _nothing, copies_ms, beside_ms = (median(turn[part].copies_ms for turn in turns) for part in range(3))
        return {
            "gib": round(2 * LAYERS * COPIED_BYTES / (1 << 30), 6),
            "compute_ms": round(compute_ms, 2),
            "copies_ms": round(copies_ms, 2),
            "both_ms": round(both_ms, 2),
            "copies_beside_ms": round(beside_ms, 2),
            "over": round(both_ms / (max(compute_ms, copies_ms) if self.waits else compute_ms), 3),
        }


class Model:
    """Layers of the same two matrices, and the caches of both tiers."""

    def __init__(self, way: str, row_bytes: int) -> None:
        self._blocks = COPIED_BYTES // row_bytes
        self._slots = self._blocks * 5 // 4
        self._stream = cupy.cuda.Stream(non_blocking=True)
        layout = CacheLayout(LAYERS, tuple(RoleSpec(role, (row_bytes,), "uint8") for role in ("key", "value")))
        self._runtime = runtime(way, self._stream)
        self._controller = CacheController(CupyBackend(layout), runtime=self._runtime)
        self._controller.initialize_kv_cache(self._slots, self._slots)
        self._step, self._rng = 0, np.random.default_rng(0)

    def times(self, case: Case) -> Times:
        """`kind` may be None, and `passes` 0."""
        transfers, compute = self._controller.transfers, self._runtime.compute_stream
        inputs = cupy.asarray(random(case.tokens, WIDTH))
        hidden = cupy.zeros((case.tokens, INNER), cupy.float16)
        cupy.cuda.Device().synchronize()
        before = compute.record_event(timed=True)
        counter, read = self._submit(case)
        if not case.waits:
            before = compute.record_event(timed=True)
        if case.passes:
            transfers.before_compute(read, (), counter=counter)
            with self._stream:
                for _pass in range(case.passes):
                    self._forward(inputs, hidden, counter)
                    counter = None
            transfers.after_compute(read, ())
        after = compute.record_event(timed=True)
        after.wait_done(60)
        transfers.drain(60)
        results = transfers.take_results()
        assert all(result.ok for result in results)
        return Times(1e3 * after.seconds_since(before), 1e3 * max((each.seconds for each in results), default=0.0))

    def _submit(self, case: Case) -> tuple[Any, tuple[int, ...]]:
        """Scattered blocks. Returns the counter of a swap-in, and the device slots that it fills."""
        if case.kind is None:
            return None, ()
        self._step += 1
        sources, targets = (tuple(self._rng.permutation(self._slots)[: self._blocks].tolist()) for _each in "ab")
        step = SwapStep.of(self._step, BlockCopies(*case.kind, sources, targets))
        overwritten = slot_set(sources) if case.by_layer and not case.waits else None
        counter = self._controller.transfers.submit(step, overwritten=overwritten)
        return counter, targets if case.waits else ()

    def _forward(self, inputs: Any, hidden: Any, counter: Any) -> None:
        for layer in range(LAYERS):
            if counter is not None:
                counter.wait_for_layer(layer)
            cupy.matmul(inputs, weights()[0], out=hidden)
            cupy.matmul(hidden, weights()[1], out=inputs)

    def close(self) -> None:
        self._controller.free()


@cache
def random(rows: int, columns: int) -> Any:
    """Normal float16 values on the host. Zeros would draw less power, and be multiplied faster."""
    return np.random.default_rng(1).standard_normal((rows, columns), np.float32).astype(np.float16)


@cache
def weights() -> list[Any]:
    """Of a layer: outputs are as large as inputs."""
    shapes = (WIDTH, INNER), (INNER, WIDTH)
    return [cupy.asarray(random(*shape) * np.float16(shape[0] ** -0.5)) for shape in shapes]


CASES = (
    ("prefill that waits for its swap-in", PREFILL, 1, SWAP_IN, True),
    ("prefill beside a swap-out", PREFILL, 1, SWAP_OUT, False),
    ("prefill beside a swap-out by layer", PREFILL, 1, SWAP_OUT, True),
    (f"{DECODE_PASSES} decode passes beside a swap-out", DECODE, DECODE_PASSES, SWAP_OUT, False),
    (f"{DECODE_PASSES} decode passes beside a swap-out by layer", DECODE, DECODE_PASSES, SWAP_OUT, True),
)
OF_EVERY_WAY: dict[str, Callable[[str], dict[str, float]]] = {
    f"{name}, {row_bytes >> 10} KB": Case(name, *rest, row_bytes) for row_bytes in ROW_BYTES for name, *rest in CASES
}
