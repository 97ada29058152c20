"""Choose the next token. Equal logits, parameters and positions give equal tokens on any machine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from ...errors import ModelError

_UINT64_MASK = 2**64 - 1

Share = Annotated[float, Meta(ge=0, le=1)]


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of a request's sampling, unchecked."""

    temperature: Annotated[float, Meta(ge=0)] = 1.0
    """Divides the logits; 0 is greedy."""
    top_p: Share = 1.0
    """Sample from the smallest set of most likely tokens with at least this probability; 0 is greedy."""
    top_k: Annotated[int, Meta(ge=-1)] = 0
    """Sample from this many most likely tokens, before `top_p`; 1 is greedy, 0 and -1 take all."""
    min_p: Share = 0.0
    """Leave out tokens below this share of the most likely token's probability."""
    seed: int = 0
    """Any 64-bit integer, signed or unsigned."""
    banned_tokens: tuple[int, ...] = ()
    """Ids that are never drawn. Another token must remain."""


def sample(logits: NDArray[np.float32], params: SamplingParams, position: int) -> int:
    """Token id drawn from `logits` `[vocab]` for the token at `position` of the sequence.

    Ties go to the lower token id. Raises `ModelError` when the largest logit is not finite.
    """
    if params.banned_tokens:
        logits = logits.copy()
        logits[list(params.banned_tokens)] = -math.inf
    largest = float(logits.max())
    if not math.isfinite(largest):
        raise ModelError(f"the model's logits are not finite at position {position}")
    if params.temperature == 0:
        return int(logits.argmax())
    # The largest exponent is 0, so a tiny temperature gives exact zeros elsewhere instead of an overflow.
    with np.errstate(over="ignore"):
        weights = np.exp((logits.astype(np.float64) - largest) / params.temperature)
    tokens = _candidates(weights, params)
    cumulative = weights[tokens].cumsum()
    threshold = _uniform(params.seed, position) * cumulative[-1]
    # "right": a token of zero weight is never chosen, not even at threshold 0.
    return int(tokens[min(int(cumulative.searchsorted(threshold, side="right")), len(tokens) - 1)])


def _candidates(weights: NDArray[np.float64], params: SamplingParams) -> NDArray[np.int64]:
    """Ids that may be drawn and their weights, up to 1. Most likely first, unless all may be."""
    if params.top_p == 1 and params.top_k <= 0 and params.min_p == 0:
        return np.arange(len(weights), dtype=np.int64)
    order = np.argsort(-weights, kind="stable")
    if params.top_k > 0:
        order = order[: params.top_k]
    order = order[weights[order] >= params.min_p]
    cumulative = weights[order].cumsum()
    size = int(cumulative.searchsorted(params.top_p * cumulative[-1], side="left")) + 1
    return order[:size].astype(np.int64)


def _uniform(seed: int, position: int) -> float:
    """In [0, 1), from a counter-based generator keyed by both arguments: no state between calls."""
    key = np.array([seed & _UINT64_MASK, position], dtype=np.uint64)
    return int(np.random.Philox(key=key).random_raw() >> 11) * 2.0**-53
