"""Decoder: the forward pass of Llama, Qwen2 and Qwen3 over a paged KV cache, batch-invariant to the last bit.

The logits and the KV of a token depend on the tokens before it and on nothing else: not on the other sequences of the
batch, not on how its prompt was cut into chunks, not on whether it was prefilled or decoded, not on where its prefix's
KV came from, as long as that is the same KV. `plan` explains why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray

from .config import ModelConfig
from .layers import DecoderLayer, Keys, Rotation, causal_masks, rms_norm
from .paged_cache import PagedCache
from .plan import TILE, BatchPlan, Bucket, SequenceSlice
from .rope import rope_tables
from .tensors import step_tensor
from .weights import DecoderWeights, load_weights

__all__ = ["Decoder", "SequenceSlice"]

Tensor = Any


class Decoder:
    """Weights in float32 on the CPU. Keeps no sequence between calls; calls must not overlap.

    Call `configure_reproducible_math` before the first import of this module.
    """

    def __init__(self, weights: DecoderWeights, config: ModelConfig) -> None:
        paddle.set_device("cpu")
        self.config = config
        self._embedding = paddle.to_tensor(weights.embedding)
        tied = weights.lm_head is weights.embedding
        self._lm_head = self._embedding if tied else paddle.to_tensor(weights.lm_head)
        self._final_norm = paddle.to_tensor(weights.final_norm)
        self._layers = [DecoderLayer(layer, config) for layer in weights.layers]
        self._masks = causal_masks(config)
        self._cos, self._sin = rope_tables(config.rope, config.head_dim, 0)

    @classmethod
    def load(cls, path: Path | None, config: ModelConfig) -> Decoder:
        """From a model directory, or with random weights. Raises `ModelError` for weights that do not fit `config`."""
        return cls(load_weights(path, config), config)

    def forward(
        self,
        sequences: Sequence[SequenceSlice],
        caches: Sequence[Tensor],
        before_layer: Callable[[int], None] | None = None,
    ) -> list[NDArray[np.float32] | None]:
        """Compute the slices, write their KV, and return float32 logits `[vocab]` after each slice's last token.

        None stands for a slice that needs no logits. `caches` is `[key_0, value_0, key_1, ...]`, each
        `[num_blocks, num_kv_heads, block_size, head_dim]` of float32, float16 or bfloat16. Writes exactly the slots
        of the given tokens; reads only slots of positions up to them. `before_layer(l)` is called once per layer, in
        order, when the new KV of layer `l` is written and before anything of its caches is read: it may wait for
        copies into other slots. What it raises ends the call; computing the same slices again is then safe.
        Raises `ValueError` for slices that do not fit the model, their block tables or the caches.
        """
        if not sequences:
            return []
        if len(caches) != 2 * len(self._layers):
            raise ValueError(f"{len(self._layers)} layers need {2 * len(self._layers)} caches, got {len(caches)}")
        num_blocks, _, block_size, _ = caches[0].shape
        plan = BatchPlan.build(sequences, self.config, num_blocks=num_blocks, block_size=block_size)
        self._extend_rope_tables(num_blocks * block_size)
        with paddle.no_grad():
            tiles = self._run_layers(plan, caches, before_layer)
            return [None if last is None else self._logits(tiles[last[0]], last[1]) for last in plan.last_rows]

    def _extend_rope_tables(self, num_slots: int) -> None:
        """To the positions that caches of `num_slots` tokens can hold: what a model says it can do may be far more."""
        # The padding rows of the last tile may lie beyond the last position.
        num_positions = min(self.config.max_position, num_slots) + TILE
        if len(self._cos) < num_positions:
            self._cos, self._sin = rope_tables(self.config.rope, self.config.head_dim, num_positions)

    def _run_layers(
        self, plan: BatchPlan, caches: Sequence[Tensor], before_layer: Callable[[int], None] | None
    ) -> list[Tensor]:
        """The hidden states after the last layer, one `[TILE, hidden]` per tile."""
        embedded = paddle.gather(self._embedding, step_tensor(plan.token_ids))
        tiles = _split_tiles(embedded, plan.num_tiles)
        rotation = Rotation(self._cos[plan.positions], self._sin[plan.positions], self.config)
        step = _StepTensors(plan)
        for index, layer in enumerate(self._layers):
            keys, values = PagedCache(caches[2 * index]), PagedCache(caches[2 * index + 1])
            qkv = rotation.apply(paddle.concat([layer.project(tile) for tile in tiles]))
            heads = qkv.reshape([-1, self.config.head_dim])
            keys.write(step.cache_rows, paddle.gather(heads, step.key_rows))
            values.write(step.cache_rows, paddle.gather(heads, step.value_rows))
            queries = self._split_queries(paddle.gather(heads, step.query_rows), plan.num_tiles)
            if before_layer is not None:
                before_layer(index)
            for bucket in step.buckets:
                context = bucket.read(keys, values)
                for tile, mask in zip(bucket.tiles, self._masks[bucket.first_variant :], strict=False):
                    tiles[tile] = layer.finish(tiles[tile], queries[tile], context, mask)
        return tiles

    def _split_queries(self, queries: Tensor, num_tiles: int) -> list[Tensor]:
        config = self.config
        group_rows = config.num_heads // config.num_kv_heads * TILE
        split: list[Tensor] = paddle.unbind(
            queries.reshape([num_tiles, config.num_kv_heads, group_rows, config.head_dim])
        )
        return split

    def _logits(self, tile: Tensor, row: int) -> NDArray[np.float32]:
        # A fresh copy of the row: the GEMV below must not depend on where in a tile its operand lies.
        hidden = paddle.gather(tile, step_tensor(np.array([row])))
        hidden = rms_norm(hidden, self._final_norm, self.config.rms_norm_eps)
        logits: NDArray[np.float32] = paddle.matmul(hidden, self._lm_head, transpose_y=True).reshape([-1]).numpy()
        return logits


def _split_tiles(rows: Tensor, num_tiles: int) -> list[Tensor]:
    tiles: list[Tensor] = paddle.unbind(rows.reshape([num_tiles, TILE, -1]))
    return tiles


class _StepTensors:
    """The plan's indices as tensors, made once and used by every layer."""

    def __init__(self, plan: BatchPlan) -> None:
        self.cache_rows = step_tensor(plan.cache_rows)
        self.key_rows = step_tensor(plan.key_rows)
        self.value_rows = step_tensor(plan.value_rows)
        self.query_rows = step_tensor(plan.query_rows)
        self.buckets = [_BucketTensors(bucket) for bucket in plan.buckets]


class _BucketTensors:
    def __init__(self, bucket: Bucket) -> None:
        self.tiles = bucket.tiles
        self.first_variant = bucket.first_variant
        self._head = step_tensor(bucket.head_rows) if len(bucket.head_rows) else None
        self._tail = step_tensor(bucket.tail_rows)
        self._all = step_tensor(bucket.all_rows)

    def read(self, keys: PagedCache, values: PagedCache) -> Keys:
        head = None if self._head is None else keys.read(self._head)
        return Keys(head, keys.read(self._tail), values.read(self._all))
