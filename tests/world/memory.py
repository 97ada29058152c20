"""Tags: the content of a position of a block. A tag names the whole prefix, its salt and the version of the weights.

A tag is the number of a (previous tag, token) pair, so two prefixes never share a tag, and a tag gives its prefix.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

UNWRITTEN, GARBAGE = 0, -1
"""A position that was never computed, and one whose copy failed or is half done."""

VOCABULARY = 7


class Tags:
    def __init__(self) -> None:
        self._numbers: dict[tuple[int, Hashable], int] = {}
        self._of: list[tuple[int, Hashable]] = [(0, "nothing")]
        self.num_compared = 0
        """Positions that were read and compared with their tags."""

    def of(self, before: int, token: Hashable) -> int:
        number = self._numbers.get((before, token))
        if number is None:
            number = self._numbers[before, token] = len(self._of)
            self._of.append((before, token))
        return number

    def extend(self, chain: list[int], tokens: Sequence[Hashable]) -> None:
        """Append the tags of `tokens`. The first tag of `chain` is that of the root."""
        before = chain[-1]
        for token in tokens:
            before = self.of(before, token)
            chain.append(before)

    def words(self, tag: int) -> str:
        if tag <= 0:
            return "nothing" if tag == UNWRITTEN else "garbage"
        if tag >= len(self._of):
            return f"no tag ({tag})"
        found: list[Hashable] = []
        while tag:
            tag, token = self._of[tag]
            found.append(token)
        root, *tokens = reversed(found)
        return f"{root} {' '.join(map(str, tokens))}"


def next_token(tag: int) -> int:
    """Return the token that the model samples after a prefix."""
    return tag % VOCABULARY + 1


class WrongError(AssertionError):
    """A law of the world is broken."""


class Prefix:
    """A growing sequence of tokens and its tags. Prefixes with another `root` share no block."""

    def __init__(self, tags: Tags, root: Hashable) -> None:
        self._tags, self.root = tags, root
        self.tokens: list[Hashable] = []
        self.chain = [tags.of(0, root)]

    def extend(self, tokens: Sequence[Hashable]) -> None:
        self.tokens += tokens
        self._tags.extend(self.chain, tokens)

    def cut(self, length: int) -> None:
        del self.tokens[length:], self.chain[length + 1 :]

    @property
    def next_token(self) -> int:
        return next_token(self.chain[-1])
