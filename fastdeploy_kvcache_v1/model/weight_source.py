"""Where weights come from: anything that gives a tensor by its Hugging Face name, such as random numbers."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


class Source(Protocol):
    """Gives the tensor of a Hugging Face name, float32, in exactly the given shape."""

    def read(self, name: str, shape: tuple[int, ...]) -> Array: ...


class RandomSource:
    """Draws tensors in the order asked for, scaled so that attention is selective and activations keep their size."""

    def __init__(self, seed: int, layer_gain: float = 1.0) -> None:
        """`layer_gain`: size of what a layer adds to its input."""
        self._layer_gain = layer_gain
        self._random = np.random.Generator(np.random.Philox(key=seed))

    def read(self, name: str, shape: tuple[int, ...]) -> Array:
        if name.endswith("norm.weight"):
            return np.ones(shape, dtype=np.float32)
        values = self._random.standard_normal(shape, dtype=np.float32)
        if name.endswith("embed_tokens.weight"):
            return values
        if name.endswith("eh_proj.weight"):  # a guess of the next token's hidden state: its embedding
            return np.eye(*shape, dtype=np.float32) + values * np.float32(0.02)
        gain = 2.0 if "q_proj" in name or "k_proj" in name else 1.0
        if "o_proj" in name or "down_proj" in name:
            gain *= self._layer_gain
        values *= np.float32(gain * shape[-1] ** -0.5)
        return values
