"""The prompts that all contenders play: a name per full block, the tokens that follow from the names, and arrivals.

Needs NumPy alone, because each contender's process reads them in an environment of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

VOCABULARY = 1 << 16


class Prompts:
    """`names(i)` are those of request `i`'s full blocks, `tokens(i)` its tokens, `arrival(i)` its time in seconds.
    Equal names mean an equal prefix.
    """

    def __init__(self, path: Path) -> None:
        with np.load(path) as file:
            self._names, self._ends, self._lengths = file["names"], file["ends"], file["lengths"]
            self._arrivals = file["arrivals"]

    def __len__(self) -> int:
        return len(self._lengths)

    def names(self, request: int) -> npt.NDArray[np.uint32]:
        return self._names[self._ends[request] : self._ends[request + 1]]

    def arrival(self, request: int) -> float:
        return float(self._arrivals[request])

    def tokens(self, request: int, block_size: int) -> npt.NDArray[np.int64]:
        """A block's first two tokens spell its name; a last, partial block spells the request."""
        last = np.array([len(self._names) + request], np.int64)
        names = np.concatenate([self.names(request).astype(np.int64), last])[:, None]
        blocks = (names * 31 + np.arange(block_size)) % VOCABULARY
        blocks[:, :1], blocks[:, 1:2] = names % VOCABULARY, names // VOCABULARY
        return blocks.ravel()[: self._lengths[request]]


def write(path: Path, requests: Iterable[tuple[Sequence[Any], int, float]]) -> None:
    """Write `(hashes of full blocks, tokens, arrival in seconds)` of each request."""
    numbers: dict[Any, int] = {}
    named, lengths, arrivals = [], [], []
    for hashes, num_tokens, arrival in requests:
        named.append([numbers.setdefault(each, len(numbers) + 1) for each in hashes])
        lengths.append(num_tokens)
        arrivals.append(arrival)
    ends = np.cumsum([0, *map(len, named)])
    np.savez(
        path, names=np.fromiter(chain.from_iterable(named), np.uint32), ends=ends,
        lengths=np.array(lengths), arrivals=np.array(arrivals, float),
    )  # fmt: skip
