"""Decoder: the forward pass of Llama, Qwen2 and Qwen3 over a paged KV cache, batch-invariant to the last bit.

The logits and the KV of a token depend on the tokens before it and on nothing else: not on the other sequences of the
batch, not on how its prompt was cut into chunks, not on whether it was prefilled or decoded, not on where its prefix's
KV came from, as long as that is the same KV. `plan` explains why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray

from .config import ModelConfig
from .layers import DecoderLayer, Rotation, attend, causal_mask, linear, rms_norm
from .paged_cache import PagedCache
from .plan import ANY_ROWS, FIXED_TILES, BatchPlan, Bucket, RowCut, SequenceSlice
from .rope import rope_tables
from .row_probe import rows_stand_alone
from .tensors import step_tensor
from .weights import DecoderWeights, load_weights

__all__ = ["Decoder", "SequenceSlice"]

logger = logging.getLogger(__name__)

Tensor = Any


class Decoder:
    """Weights in float32 on the CPU. Keeps no sequence between calls; calls must not overlap.

    Call `configure_reproducible_math` before the first import of this module.
    """

    def __init__(self, weights: DecoderWeights, config: ModelConfig, cut: RowCut | None = None) -> None:
        """`cut` is found out when it is not given."""
        paddle.set_device("cpu")
        self.config = config
        self._embedding = paddle.to_tensor(weights.embedding)
        tied = weights.lm_head is weights.embedding
        self._lm_head = self._embedding if tied else paddle.to_tensor(weights.lm_head)
        self._final_norm = paddle.to_tensor(weights.final_norm)
        self._layers = [DecoderLayer(layer, config) for layer in weights.layers]
        self.cut = cut or self._find_cut()
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
        plan = BatchPlan.build(sequences, self.config, self.cut, num_blocks=num_blocks, block_size=block_size)
        self._extend_rope_tables(num_blocks * block_size)
        with paddle.no_grad():
            return self._logits(self._run_layers(plan, caches, before_layer), plan.last_rows)

    def _find_cut(self) -> RowCut:
        if rows_stand_alone(self._layers[0], self._lm_head, self.config):
            return ANY_ROWS
        logger.warning("the math library's results depend on the number of rows: computing 8 rows at a time, slowly")
        return FIXED_TILES

    def _extend_rope_tables(self, num_slots: int) -> None:
        """To the positions that caches of `num_slots` tokens can hold: what a model says it can do may be far more."""
        # Padding rows may lie beyond the last position.
        num_positions = min(self.config.max_position, num_slots) + self.cut.align
        if len(self._cos) < num_positions:
            self._cos, self._sin = rope_tables(self.config.rope, self.config.head_dim, num_positions)

    def _run_layers(
        self, plan: BatchPlan, caches: Sequence[Tensor], before_layer: Callable[[int], None] | None
    ) -> Tensor:
        """The hidden states after the last layer, `[rows, hidden]`."""
        rotation = Rotation(self._cos[plan.positions], self._sin[plan.positions], self.config)
        step = _StepTensors(plan, self.config)
        pieces = self._split(paddle.gather(self._embedding, step.token_ids))
        for index, layer in enumerate(self._layers):
            keys, values = PagedCache(caches[2 * index]), PagedCache(caches[2 * index + 1])
            qkv = _join([layer.project(piece) for piece in pieces])
            rotation.apply_(qkv)
            heads = qkv.reshape([-1, self.config.head_dim])
            keys.write(step.cache_rows, paddle.gather(heads, step.key_rows))
            values.write(step.cache_rows, paddle.gather(heads, step.value_rows))
            queries = paddle.gather(heads, step.query_rows)
            if before_layer is not None:
                before_layer(index)
            attention = _join([bucket.attend(queries, keys, values) for bucket in step.buckets])
            attention = paddle.gather(attention, step.attention_rows).reshape([qkv.shape[0], -1])
            pieces = [layer.finish(*piece) for piece in zip(pieces, self._split(attention), strict=True)]
        return _join(pieces)

    def _split(self, rows: Tensor) -> list[Tensor]:
        """Into what is computed together."""
        size = self.cut.linear
        return [rows[start : start + size] for start in range(0, rows.shape[0], size)]

    def _logits(self, hidden: Tensor, rows: Sequence[int | None]) -> list[NDArray[np.float32] | None]:
        wanted = np.array([row for row in rows if row is not None], dtype=np.int64)
        size = self.cut.logits
        computed: list[NDArray[np.float32]] = []
        for start in range(0, len(wanted), size):
            picked = paddle.gather(hidden, step_tensor(wanted[start : start + size]))
            normed = rms_norm(picked, self._final_norm, self.config.rms_norm_eps)
            computed.extend(linear(normed, self._lm_head).numpy())
        of_rows = iter(computed)
        return [None if row is None else next(of_rows) for row in rows]


def _join(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else paddle.concat(pieces)


class _StepTensors:
    """The plan's indices as tensors, made once and used by every layer."""

    def __init__(self, plan: BatchPlan, config: ModelConfig) -> None:
        self.token_ids = step_tensor(plan.token_ids)
        self.cache_rows = step_tensor(plan.cache_rows)
        self.key_rows = step_tensor(plan.key_rows)
        self.value_rows = step_tensor(plan.value_rows)
        self.query_rows = step_tensor(plan.query_rows)
        self.attention_rows = step_tensor(plan.attention_rows)
        self.buckets = [_BucketTensors(bucket, config) for bucket in plan.buckets]


class _BucketTensors:
    def __init__(self, bucket: Bucket, config: ModelConfig) -> None:
        self._queries = slice(bucket.rows.start * config.num_heads, bucket.rows.stop * config.num_heads)
        self._shape = [config.num_kv_heads, -1, config.head_dim]
        self._cache_rows = step_tensor(bucket.cache_rows)
        self._mask = causal_mask(bucket.first, len(bucket.rows), config)

    def attend(self, queries: Tensor, keys: PagedCache, values: PagedCache) -> Tensor:
        """`queries` of the whole batch in the plan's order; the bucket's result in the same order."""
        own = queries[self._queries]
        result = attend(
            own.reshape(self._shape), keys.read(self._cache_rows), values.read(self._cache_rows), self._mask
        )
        return result.reshape(own.shape)
