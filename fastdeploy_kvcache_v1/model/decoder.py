"""Decoder: the forward pass of every attention family over a paged KV cache, batch-invariant to the last bit.

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

from .attention_families import family_of
from .config import ModelConfig
from .layers import DecoderLayer, DraftInput, linear, rms_norm
from .plan import ANY_ROWS, FIXED_TILES, BatchPlan, RowCut, SequenceSlice
from .ranks import ONE_RANK, Ranks
from .rope import rope_tables
from .row_probe import rows_stand_alone
from .shards import require_heads_stand_alone, shard_weights
from .tensors import as_array, step_tensor
from .weights import DecoderWeights, load_weights

__all__ = ["Decoder", "SequenceSlice"]

logger = logging.getLogger(__name__)

Tensor = Any


class Decoder:
    """Weights in float32 on the CPU. Keeps no sequence between calls; calls must not overlap.

    Call `configure_reproducible_math` before the first import of this module.
    """

    def __init__(
        self, weights: DecoderWeights, config: ModelConfig, cut: RowCut | None = None, ranks: Ranks = ONE_RANK
    ) -> None:
        """`cut` is found out when it is not given. With several `ranks` this is one of them, see `shards`; `weights`
        and `config` are those of the whole model. Raises `ConfigError` if it cannot be split so.
        """
        paddle.set_device("cpu")
        self.config = config
        self._ranks = ranks
        self._own = config.shard(ranks.size)
        """With the heads of this rank."""
        self._embedding = paddle.to_tensor(weights.embedding)
        tied = weights.lm_head is weights.embedding
        self._lm_head = self._embedding if tied else paddle.to_tensor(weights.lm_head)
        self._final_norm = paddle.to_tensor(weights.final_norm)
        self._family = family = family_of(config)
        self._layers = [
            DecoderLayer(layer, config, family.projection(shard_weights(layer.attention, config, ranks), self._own))
            for layer in weights.layers
        ]
        self._draft = None if weights.draft is None else DraftInput(weights.draft, config)
        self.cut = cut or self._find_cut(weights)
        if ranks.size > 1:
            require_heads_stand_alone(weights.layers[0].attention, config, self.cut, ranks.size)
        self._cos, self._sin = rope_tables(config.rope, config.rope_dim, 0)

    @classmethod
    def load(cls, path: Path | None, config: ModelConfig, ranks: Ranks = ONE_RANK) -> Decoder:
        """From a model directory, or with random weights. Raises `ModelError` for weights that do not fit `config`,
        `ConfigError` as the constructor.
        """
        return cls(load_weights(path, config), config, ranks=ranks)

    def forward(
        self,
        sequences: Sequence[SequenceSlice],
        caches: Sequence[Tensor],
        before_layer: Callable[[int], None] | None = None,
    ) -> list[NDArray[np.float32] | None]:
        """Compute the slices, write their KV, and return float32 logits `[vocab]` after each slice's last token.

        None stands for a slice that needs no logits. `caches` are the tensors of `ModelConfig.cache_backend`, layer by
        layer, roles in role order. Writes exactly the slots of the given tokens; reads only slots of positions up to
        them. `before_layer(l)` is called once per layer, in order, when the new KV of layer `l` is written and before
        anything of its caches is read: it may wait for copies into other slots. What it raises ends the call;
        computing the same slices again is then safe.
        Raises `ValueError` for slices that do not fit the model, their block tables or the caches; with several ranks
        also as `Ranks.gather`.
        """
        if not sequences:
            return []
        plan = self.plan(sequences, caches)
        with paddle.no_grad():
            hidden = self.run_layers(plan, self.embed(plan), range(self.config.num_layers), caches, before_layer)
            rows = iter(self.logits(hidden, [row for row in plan.last_rows if row is not None]))
            return [None if row is None else next(rows) for row in plan.last_rows]

    def plan(self, sequences: Sequence[SequenceSlice], caches: Sequence[Tensor]) -> BatchPlan:
        """Raises `ValueError` as `forward`."""
        num_roles, rest = divmod(len(caches), len(self._layers))
        if rest or num_roles not in self._family.num_roles:
            needed = " or ".join(str(number * len(self._layers)) for number in self._family.num_roles)
            raise ValueError(f"{len(self._layers)} layers need {needed} caches, got {len(caches)}")
        num_blocks, _, block_size, _ = caches[0].shape
        plan = BatchPlan.build(sequences, self._own, self.cut, num_blocks=num_blocks, block_size=block_size)
        self._extend_rope_tables(num_blocks * block_size)
        return plan

    def embed(self, plan: BatchPlan) -> Tensor:
        """`[rows, hidden]`: of tokens, and of what a slice brings in their place."""
        rows = paddle.gather(self._embedding, step_tensor(plan.token_ids))
        for given in plan.embedded:
            rows[given.first : given.first + len(given.values)] = paddle.to_tensor(given.values)
        return rows

    def _find_cut(self, weights: DecoderWeights) -> RowCut:
        """Of the whole model: it must not depend on the number of ranks."""
        first, layer = weights.layers[0], self._layers[0]
        if self._ranks.size > 1:
            layer = DecoderLayer(first, self.config, self._family.projection(first.attention, self.config))
        if rows_stand_alone(layer, self._lm_head, self.config):
            return ANY_ROWS
        logger.warning("the math library's results depend on the number of rows: computing 8 rows at a time, slowly")
        return FIXED_TILES

    def _extend_rope_tables(self, num_slots: int) -> None:
        """To the positions that caches of `num_slots` tokens can hold: what a model says it can do may be far more."""
        # Padding rows may lie beyond the last position.
        num_positions = min(self.config.max_position, num_slots) + self.cut.align
        if len(self._cos) < num_positions:
            self._cos, self._sin = rope_tables(self.config.rope, self.config.rope_dim, num_positions)

    def run_layers(
        self,
        plan: BatchPlan,
        hidden: Tensor,
        layers: range,
        caches: Sequence[Tensor],
        before_layer: Callable[[int], None] | None,
    ) -> Tensor:
        """The hidden states `[rows, hidden]` after some `layers`, from those before them."""
        attention = self._family.attention(plan, self._own, self._cos[plan.positions], self._sin[plan.positions])
        num_roles = len(caches) // len(self._layers)
        pieces = self._split(hidden)
        for index in layers:
            layer, own = self._layers[index], caches[index * num_roles : (index + 1) * num_roles]
            projected = zip(*(layer.project(piece) for piece in pieces), strict=True)
            queries = attention.write([_join(list(each)) for each in projected], own)
            if before_layer is not None:
                before_layer(index)
            attended = self._of_all_ranks(attention.attend(queries, own))
            pieces = [layer.finish(*piece) for piece in zip(pieces, self._split(attended), strict=True)]
        return _join(pieces)

    def _of_all_ranks(self, attended: Tensor) -> Tensor:
        """`[rows, heads of this rank * value_dim]` -> `[rows, num_heads * value_dim]`."""
        return attended if self._ranks.size == 1 else step_tensor(self._ranks.gather(as_array(attended)))

    def join_drafts(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """What the draft layer gets: `[rows, hidden]` of embeddings and hidden states of as many rows."""
        assert self._draft is not None, "the model has no draft layer"
        return _join([self._draft(*pair) for pair in zip(self._split(embedded), self._split(hidden), strict=True)])

    def _split(self, rows: Tensor) -> list[Tensor]:
        """Into what is computed together."""
        size = self.cut.linear
        return [rows[start : start + size] for start in range(0, rows.shape[0], size)]

    def logits(self, hidden: Tensor, rows: Sequence[int]) -> list[NDArray[np.float32]]:
        """`[vocab]` after each of `rows` of the hidden states after the last layer."""
        wanted = np.array(rows, dtype=np.int64)
        size = self.cut.logits
        computed: list[NDArray[np.float32]] = []
        for start in range(0, len(wanted), size):
            picked = paddle.gather(hidden, step_tensor(wanted[start : start + size]))
            normed = rms_norm(picked, self._final_norm, self.config.rms_norm_eps)
            computed.extend(linear(normed, self._lm_head).numpy())
        return computed


def _join(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else paddle.concat(pieces)
