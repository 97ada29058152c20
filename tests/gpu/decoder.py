"""A small decoder on a GPU through CuPy: paged attention over the package's cache, the same tokens in any batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cupy
import numpy as np
from kernels import kernel

from fastdeploy_kvcache_v1.model.plan import SequenceSlice

LAYERS, HEADS, HEAD_DIM, VOCABULARY, LONGEST = 3, 2, 8, 128, 256
WIDTH = HEADS * HEAD_DIM
THREADS = 128
WRITE, TANH, ADD = 0, 1, 2


class Decoder:
    """Random weights of one seed. `forward` is what `StepRunner` asks of a model; it computes on `stream`."""

    def __init__(self, stream: Any, block_size: int, seed: int = 1) -> None:
        self.stream, self.block_size = stream, block_size
        rng = np.random.default_rng(seed)

        def weights(*shape: int) -> np.ndarray:
            return rng.normal(0, 1.5 / np.sqrt(shape[0]), shape).astype(np.float32)

        self._embedding = rng.normal(0, 1, (VOCABULARY, WIDTH)).astype(np.float32)
        self._place = rng.normal(0, 0.5, (LONGEST, WIDTH)).astype(np.float32)
        with stream:
            self._layers = [
                [cupy.asarray(weights(WIDTH, width)) for width in (3 * WIDTH, WIDTH, WIDTH, WIDTH)]
                for _layer in range(LAYERS)
            ]
            self._head = cupy.asarray(weights(WIDTH, VOCABULARY))

    def forward(
        self, sequences: list[SequenceSlice], caches: list[Any], before_layer: Callable[[int], None]
    ) -> list[np.ndarray | None]:
        """Logits `[VOCABULARY]` of each sequence's last token that wants them. `caches`: key and value tensor of each
        layer, one after the other. Waits for the result, and for nothing else.
        """
        tokens = np.concatenate([each.token_ids for each in sequences])
        positions = np.concatenate([np.arange(each.start, each.end) for each in sequences])
        blocks = max(len(each.block_table) for each in sequences)
        tables = np.zeros((len(tokens), blocks), np.int64)
        ends = np.cumsum([len(each.token_ids) for each in sequences])
        for each, end in zip(sequences, ends, strict=True):
            tables[end - len(each.token_ids) : end, : len(each.block_table)] = each.block_table
        with self.stream:
            where = cupy.asarray(tables), cupy.asarray(positions.astype(np.int64))
            hidden = cupy.asarray(self._embedding[tokens] + self._place[positions])
            for layer in range(LAYERS):
                before_layer(layer)
                self._layer(hidden, self._layers[layer], caches[2 * layer : 2 * layer + 2], where)
            logits = cupy.empty((len(tokens), VOCABULARY), cupy.float32)
            self._project(logits, hidden, self._head, WRITE)
            found = cupy.asnumpy(logits)
        return [found[end - 1] if each.needs_logits else None for each, end in zip(sequences, ends, strict=True)]

    def _layer(self, hidden: Any, weights: list[Any], cache: list[Any], where: tuple[Any, Any]) -> None:
        rows, blocks = where[0].shape
        qkv = cupy.empty((rows, 3 * WIDTH), cupy.float32)
        mixed, inner = (cupy.empty((rows, WIDTH), cupy.float32) for _ in range(2))
        self._project(qkv, hidden, weights[0], WRITE)
        sizes = (rows, blocks, self.block_size, WIDTH)
        self._launch("store_kv", rows * WIDTH, *cache, qkv, *where, *sizes)
        self._launch("attend_paged", rows * HEADS, mixed, *cache, qkv, *where, *sizes, HEAD_DIM)
        self._project(hidden, mixed, weights[1], ADD)
        self._project(inner, hidden, weights[2], TANH)
        self._project(hidden, inner, weights[3], ADD)

    def _project(self, out: Any, of: Any, weight: Any, mode: int) -> None:
        rows, (width, to) = of.shape[0], weight.shape
        self._launch("project", rows * to, out, of, weight, rows, width, to, mode)

    def _launch(self, name: str, threads: int, *arguments: Any) -> None:
        converted = [np.int32(each) if isinstance(each, int) else each for each in arguments]
        kernel(name)((-(-threads // THREADS),), (THREADS,), tuple(converted))
