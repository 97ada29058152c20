"""A model's pass beside copies of its cache on a GPU, by every copy path: what either of them loses.

A layer is two products of float16 matrices. Its cache has the rows of a model with 8 KV heads, and goes through the
worker's own controller: a pass waits for its swap-in layer by layer. Milliseconds are those of the GPU; what it takes
to submit copies is in `us_per_layer` of the rates.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
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
        self._weights = [cupy.zeros(shape, cupy.float16) for shape in ((WIDTH, INNER), (INNER, WIDTH))]
        self._step, self._rng = 0, np.random.default_rng(0)

    def times(self, tokens: int, passes: int, copies: Sequence[Any]) -> Times:
        """Of `passes` passes (0: none) beside copies. The clock starts behind the submission of the copies."""
        transfers, compute = self._controller.transfers, self._runtime.compute_stream
        inputs, hidden = (cupy.zeros((max(1, tokens), width), cupy.float16) for width in (WIDTH, INNER))
        cupy.cuda.Device().synchronize()
        counter, read = self._submit(copies)
        before = compute.record_event(timed=True)
        if passes:
            transfers.before_compute(read, (), counter=counter)
            with self._stream:
                for _pass in range(passes):
                    self._forward(inputs, hidden, counter)
                    counter = None
            transfers.after_compute(read, ())
        after = compute.record_event(timed=True)
        after.wait_done(60)
        transfers.drain(60)
        results = transfers.take_results()
        assert all(result.ok for result in results)
        return Times(1e3 * after.seconds_since(before), 1e3 * max((each.seconds for each in results), default=0.0))

    def _submit(self, copies: Sequence[Any]) -> tuple[Any, tuple[int, ...]]:
        """Scattered blocks. Returns the counter of a swap-in, and the device slots that it fills."""
        self._step += 1
        parts = [self._rng.permutation(self._slots)[: self._blocks].tolist() for _each in (0, 1)]
        moves = [BlockCopies(*kind, *map(tuple, parts)) for kind in copies]
        counter = self._controller.transfers.submit(SwapStep.of(self._step, *moves)) if moves else None
        return counter, tuple(parts[1]) if SWAP_IN in copies else ()

    def _forward(self, inputs: Any, hidden: Any, counter: Any) -> None:
        for layer in range(LAYERS):
            if counter is not None:
                counter.wait_for_layer(layer)
            cupy.matmul(inputs, self._weights[0], out=hidden)
            cupy.matmul(hidden, self._weights[1], out=inputs)

    def close(self) -> None:
        self._controller.free()


def beside(row_bytes: int, tokens: int, passes: int, copies: Sequence[Any], way: str) -> dict[str, float]:
    """Both alone, and together: in turns, so that a change of the clock meets all three."""
    with closing(Model(way, row_bytes)) as model:
        turns = [
            (model.times(tokens, passes, ()), model.times(0, 0, copies), model.times(tokens, passes, copies))
            for _turn in range(TURNS + 1)
        ][1:]
    compute_ms = median(alone.compute_ms for alone, _copies, _both in turns)
    copies_ms = median(copies.copies_ms for _alone, copies, _both in turns)
    both_ms = median(both.compute_ms for _alone, _copies, both in turns)
    longer_ms = max(compute_ms, copies_ms) if SWAP_IN in copies else compute_ms
    return {
        "compute_ms": round(compute_ms, 2),
        "copies_ms": round(copies_ms, 2),
        "both_ms": round(both_ms, 2),
        "copies_beside_ms": round(median(both.copies_ms for _alone, _copies, both in turns), 2),
        "over": round(both_ms / longer_ms, 3),
    }


CASES = {
    "prefill that waits for its swap-in": (PREFILL, 1, (SWAP_IN,)),
    "prefill beside a swap-out": (PREFILL, 1, (SWAP_OUT,)),
    f"{DECODE_PASSES} decode passes beside a swap-out": (DECODE, DECODE_PASSES, (SWAP_OUT,)),
}
OF_EVERY_WAY: dict[str, Callable[[str], dict[str, float]]] = {
    f"{name}, {row_bytes >> 10} KB": partial(beside, row_bytes, *case)
    for row_bytes in ROW_BYTES
    for name, case in CASES.items()
}
