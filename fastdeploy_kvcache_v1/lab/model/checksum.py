"""A model whose KV is a checksum of all tokens before it: one wrong bit changes all later tokens.

Each key-value head carries a 64-bit state from layer to layer. A token's row in a layer is an expansion of its state.
Its next state mixes in a checksum of *all* bytes of all rows up to its own:

    row[p]   = expand(state[p])                                  bytes of every role of this layer and head
    chain[p] = sum over q <= p of mix(checksum(row[q]) + q)
    state[p] = mix(state[p] ^ chain[p])                          for the next layer

`mix` is a bijection, so a wrong, stale or missing bit in any row changes the states of all later tokens. All numbers
are integers: a token's state does not depend on chunks, batches or blocks.

The sum of all heads' states after the last layer chooses the next token. So heads can be split over ranks, which add
up their sums. If all ranks cache the same bytes, the first rank's sum counts, and any difference from it.

With a draft layer, some tokens depend on the token before them alone and can be guessed. A row of the draft layer is
made of the last layer's row, and a guess needs all rows before it. A wrong bit there spoils later guesses, not tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...attention.base import DTYPE_BYTES, CacheLayout, RoleSpec
from .config import ChecksumConfig
from .ranks import ONE_RANK, Ranks
from .step import Logits, SequenceSlice
from .tensors import as_array

if TYPE_CHECKING:
    from .step_runner import Guess

__all__ = ["ChecksumModel"]

Bytes = NDArray[np.uint8]
States = NDArray[np.uint64]
U64 = np.uint64

GOLDEN = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio, so its multiples are far apart."""

LOGIT_SCALE = np.float32(2.0**-21)
"""Logits are 24 random bits, from 0 to 8."""


def mix(x: States) -> States:
    """A bijection in which each bit of the result depends on each bit of `x` (the end of splitmix64)."""
    x = (x ^ (x >> U64(30))) * U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> U64(27))) * U64(0x94D049BB133111EB)
    return x ^ (x >> U64(31))


def factors(seed: int, *shape: int) -> States:
    """Odd factors: multiplication by them is a bijection."""
    start = U64((seed * GOLDEN) % 2**64)
    numbers = mix(start + np.arange(1, 1 + int(np.prod(shape)), dtype=U64) * U64(GOLDEN))
    return (numbers | U64(1)).reshape(shape)


class RoleRows:
    """One role's rows in one layer. A row is `width` bytes, processed as 64-bit words."""

    def __init__(self, role: RoleSpec, heads: slice, seed: int) -> None:
        """`heads`: the model's heads that are cached here."""
        axis = 0 if role.role == "indexer" else 1  # of the block's tokens
        self.num_heads, self.block_size = (1, *role.block_shape)[axis], role.block_shape[axis]
        self._item_bytes = DTYPE_BYTES[role.dtype]
        self._width = role.block_bytes // (self.num_heads * self.block_size)
        self._words = -(-self._width // 8)
        shape = (heads.stop, self._words)
        self._expansion = factors(2 * seed, *shape)[heads]
        self._weights = factors(2 * seed + 1, *shape)[heads]

    def view(self, cache: Any) -> Bytes:
        """`[num_blocks, heads, block_size, width]`, in the memory of a cache tensor."""
        items = as_array(cache, f"u{self._item_bytes}")
        return items.reshape(-1)[:, None].view(np.uint8).reshape(-1, self.num_heads, self.block_size, self._width)

    def expand(self, states: States) -> Bytes:
        """States `[n, heads]` -> rows `[n, heads, width]`."""
        return self._bytes(mix(states[:, :, None] * self._expansion))

    def again(self, rows: Bytes) -> Bytes:
        """Other rows, made of `rows`."""
        return self._bytes(mix(self._as_words(rows) * self._expansion))

    def checksums(self, rows: Bytes) -> States:
        """`[n, heads]`"""
        sums: States = (self._as_words(rows) * self._weights).sum(axis=2, dtype=U64)
        return sums

    def _as_words(self, rows: Bytes) -> States:
        if self._width == self._words * 8:
            return np.ascontiguousarray(rows).view(U64)
        padded = np.zeros((*rows.shape[:2], self._words * 8), np.uint8)
        padded[..., : self._width] = rows
        return padded.view(U64)

    def _bytes(self, words: States) -> Bytes:
        return words.view(np.uint8)[..., : self._width]


class Places:
    """Places of a sequence's rows `[0, end)`; the tokens to compute are `[start, end)`."""

    def __init__(self, sequence: SequenceSlice, block_size: int) -> None:
        positions = np.arange(sequence.end)
        self.start, self.positions = sequence.start, positions.astype(U64)[:, None]
        self._table = np.asarray(sequence.block_table, dtype=np.int64)[: -(-sequence.end // block_size)]
        new = positions[sequence.start :]
        self._new = self._table[new // block_size], slice(None), new % block_size

    def read(self, rows: Bytes) -> Bytes:
        """`[end, heads, width]`"""
        blocks = rows[self._table].transpose(0, 2, 1, 3)
        return blocks.reshape(-1, *blocks.shape[2:])[: len(self.positions)]

    def write(self, rows: Bytes, values: Bytes) -> None:
        rows[self._new] = values


class ChecksumModel:
    """Keeps no sequence between calls; calls must not overlap. `StepRunner` runs it."""

    def __init__(self, config: ChecksumConfig, layout: CacheLayout, *, seed: int = 0, ranks: Ranks = ONE_RANK) -> None:
        """`config` of the whole model, `layout` of this rank's cache. `seed` decides the tokens."""
        self.config = config
        self._ranks = ranks
        self._alike = config.ranks_cache_alike
        self._num_roles = len(layout.roles)
        self._layers = [
            [self._rows(role, seed * 10_007 + 16 * layer + number) for number, role in enumerate(layout.roles)]
            for layer in range(layout.num_layers)
        ]
        self._vocabulary = factors(seed * 10_007 - 1, config.vocab_size)

    def _rows(self, role: RoleSpec, seed: int) -> RoleRows:
        heads = 1 if self._alike else self.config.num_kv_heads // self._ranks.size
        first = 0 if self._alike else self._ranks.rank * heads
        return RoleRows(role, slice(first, first + heads), seed)

    def forward(
        self,
        sequences: Sequence[SequenceSlice],
        caches: Sequence[Any],
        before_layer: Callable[[int], None] = lambda layer: None,
    ) -> list[Logits]:
        """As `step_runner.Model`."""
        views, places = self._views(caches), self._places(sequences, caches)
        states = [self._first_states(sequence) for sequence in sequences]
        for number in range(self.config.num_layers):
            layer, own = self._layers[number], views[number]
            for where, state in zip(places, states, strict=True):
                for role, rows in zip(layer, own, strict=True):
                    where.write(rows, role.expand(state))
            before_layer(number)
            for index, where in enumerate(places):
                seen = sum(role.checksums(where.read(rows)) for role, rows in zip(layer, own, strict=True))
                chain = np.cumsum(mix(seen + where.positions), axis=0, dtype=U64)
                states[index] = mix(states[index] ^ chain[where.start :])
        last = [own[len(own) - each.num_logits :] for each, own in zip(sequences, states, strict=True)]
        sums = self._of_all_ranks([own.sum(axis=1, dtype=U64) for own in last])
        return [self._logits(each, own) for each, own in zip(sequences, sums, strict=True)]

    @property
    def guess(self) -> Guess | None:
        """As `step_runner.Model`."""
        return self._guess if self.config.num_draft_layers else None

    def _guess(
        self,
        sequences: Sequence[SequenceSlice],
        chosen: Sequence[int | None],
        caches: Sequence[Any],
        before_layer: Callable[[int], None] = lambda layer: None,
    ) -> list[int | None]:
        number = self.config.num_layers
        layer, (*_, last, drafts) = self._layers[number], self._views(caches)
        places = self._places(sequences, caches)
        made = [[role.again(where.read(rows)) for role, rows in zip(layer, last, strict=True)] for where in places]
        for where, expected in zip(places, made, strict=True):
            for rows, values in zip(drafts, expected, strict=True):
                where.write(rows, values[where.start :])
        before_layer(number)
        good = [
            all(np.array_equal(where.read(rows), values) for rows, values in zip(drafts, expected, strict=True))
            for where, expected in zip(places, made, strict=True)
        ]
        good = [all(each) for each in zip(*map(list, self._ranks.exchange(bytes(good))), strict=True)]
        return [
            None if token is None else (self._after(token) + (not is_good)) % self.config.vocab_size
            for token, is_good in zip(chosen, good, strict=True)
        ]

    def _views(self, caches: Sequence[Any]) -> list[list[Bytes]]:
        if len(caches) != len(self._layers) * self._num_roles:
            raise ValueError(f"{len(self._layers)} layers of {self._num_roles} roles got {len(caches)} caches")
        tensors = iter(caches)
        return [[role.view(next(tensors)) for role in layer] for layer in self._layers]

    def _places(self, sequences: Sequence[SequenceSlice], caches: Sequence[Any]) -> list[Places]:
        block_size = self._layers[0][0].block_size
        for each in sequences:
            each.check(max_position=self.config.max_position, num_blocks=len(caches[0]), block_size=block_size)
        return [Places(each, block_size) for each in sequences]

    def _first_states(self, sequence: SequenceSlice) -> States:
        """`[n, heads]`: of a token and its position."""
        positions = np.arange(sequence.start, sequence.end, dtype=U64)
        first = mix(mix(sequence.token_ids.astype(U64) + U64(GOLDEN)) + positions)
        return np.repeat(first[:, None], self._layers[0][0].num_heads, axis=1)

    def _of_all_ranks(self, sums: list[States]) -> list[States]:
        """Raises as `Ranks.exchange`."""
        joined = np.concatenate(sums)
        parts = [np.frombuffer(part, dtype=U64) for part in self._ranks.exchange(joined.tobytes())]
        if self._alike:
            parts = [parts[0], *((part - parts[0]) * U64(2 * rank + 1) for rank, part in enumerate(parts[1:], 1))]
        total = np.sum(parts, axis=0, dtype=U64)
        return np.split(total, np.cumsum([len(each) for each in sums])[:-1])

    def _logits(self, sequence: SequenceSlice, values: States) -> Logits:
        """`[rows, vocab]` after the last tokens of the slice."""
        values = values.copy()
        for row, at in enumerate(range(sequence.end - len(values), sequence.end)):
            if self._is_guessable(at + 1):
                values[row] = self._of_token(int(sequence.token_ids[at - sequence.start]))
        return self._scores(values)

    def _scores(self, values: States) -> Logits:
        return (mix(values[:, None] * self._vocabulary) >> U64(40)).astype(np.float32) * LOGIT_SCALE

    def _is_guessable(self, position: int) -> bool:
        """True: the token depends on the one before it alone. Nearly half of them do, at most three in a row."""
        return self.config.guessable and position % 4 != 0 and (position * GOLDEN) % 2**64 >> 61 < 5

    def _of_token(self, token: int) -> int:
        return (token * 2 + 1) * GOLDEN % 2**64

    def _after(self, token: int) -> int:
        return int(self._scores(np.array([self._of_token(token)], dtype=U64)).argmax())
