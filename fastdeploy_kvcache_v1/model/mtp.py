"""Multi-token prediction: a draft layer guesses the token after the next one, and the next step verifies the guess.

At position `i` the draft layer sees the hidden state of token `i` and the embedding of token `i + 1`, and guesses token
`i + 2`. Its cache is written in the same step as that of the other layers, for the same positions, so a block is
complete in all layers or in none. At the last position of a block it depends on the token behind the block: where
prompts part there, one position of the draft's cache is that of the other prompt. That may cost an accepted guess,
never a token.

A guess is computed as if it were the next token. The model's logits before it say which token comes next: if it is
the guess, the logits behind it count, too. Sampling is a function of logits and position, so this holds for sampled
tokens as for greedy ones: with and without drafts, a request's tokens are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray

from .decoder import Decoder
from .plan import BatchPlan, DraftSlice, SequenceSlice
from .tensors import step_tensor

Tensor = Any
Logits = NDArray[np.float32]

Choose = Callable[[int, list[Logits]], list[int]]
"""`choose(i, logits)` gives the tokens of slice `i`: one, and one more for each guess that was right; none on an error.
`logits` are those after the token before the first guess, and after each guess."""


class DraftingDecoder:
    """A decoder with its draft layer. Calls must not overlap."""

    def __init__(self, decoder: Decoder) -> None:
        assert decoder.config.num_draft_layers, "the model has no draft layer"
        self._decoder = decoder
        self._num_layers = decoder.config.num_layers

    def forward(
        self,
        slices: Sequence[DraftSlice],
        caches: Sequence[Tensor],
        before_layer: Callable[[int], None],
        choose: Choose,
    ) -> list[int | None]:
        """Compute the slices, let `choose` take tokens, and guess what follows them; None where nothing was chosen.

        As `Decoder.forward`; `before_layer` is also called for the draft layer, the last one.
        """
        if not slices:
            return []
        sequences = [each.sequence for each in slices]
        plan = self._decoder.plan(sequences, caches)
        with paddle.no_grad():
            hidden = self._decoder.run_layers(
                plan, self._decoder.embed(plan), range(self._num_layers), caches, before_layer
            )
            rows = np.split(plan.rows, np.cumsum([len(each.token_ids) for each in sequences])[:-1])
            chosen = self._choose(sequences, hidden, rows, choose)
            following = [_follow(each, tokens) for each, tokens in zip(slices, chosen, strict=True)]
            return self._guess(following, hidden, rows, caches, before_layer)

    def _choose(
        self, sequences: list[SequenceSlice], hidden: Tensor, rows: list[NDArray[np.int64]], choose: Choose
    ) -> list[list[int]]:
        wanted = [
            own[-1 - s.num_drafts :] if s.needs_logits else own[:0] for s, own in zip(sequences, rows, strict=True)
        ]
        logits = iter(self._decoder.logits(hidden, np.concatenate(wanted).tolist()))
        return [choose(index, [next(logits) for _ in own]) if len(own) else [] for index, own in enumerate(wanted)]

    def _guess(
        self,
        following: list[SequenceSlice],
        hidden: Tensor,
        rows: list[NDArray[np.int64]],
        caches: Sequence[Tensor],
        before_layer: Callable[[int], None],
    ) -> list[int | None]:
        plan: BatchPlan = self._decoder.plan(following, caches)
        source = np.zeros(len(plan.positions), dtype=np.int64)
        source[plan.rows] = np.concatenate(
            [own[: len(each.token_ids)] for own, each in zip(rows, following, strict=True)]
        )
        joined = self._decoder.join_drafts(self._decoder.embed(plan), paddle.gather(hidden, step_tensor(source)))
        layers = range(self._num_layers, self._num_layers + 1)
        guessed = self._decoder.run_layers(plan, joined, layers, caches, before_layer)
        logits = iter(self._decoder.logits(guessed, [row for row in plan.last_rows if row is not None]))
        return [None if row is None else int(next(logits).argmax()) for row in plan.last_rows]


def _follow(slice_: DraftSlice, chosen: list[int]) -> SequenceSlice:
    """The same positions without wrong guesses, each with the token behind it.

    Of an image the draft layer gets the placeholders: that may cost guesses, and no chunk needs what is behind it.
    """
    sequence = slice_.sequence
    known = sequence.token_ids[: len(sequence.token_ids) - sequence.num_drafts]
    # A request that failed gets any token: nothing of it is used.
    behind = chosen or [0 if slice_.next_token is None else slice_.next_token]
    tokens = np.concatenate([known[1:], np.array(behind, dtype=np.int64)])
    return SequenceSlice(tokens, sequence.start, sequence.block_table, needs_logits=bool(chosen))
