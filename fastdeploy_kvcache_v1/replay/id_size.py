"""How many tokens a hash id of a trace stands for: 512 with Mooncake, 16 with Qwen-Bailian, 64 with our own."""

from __future__ import annotations

from ..errors import ConfigError

SIZES = tuple(1 << power for power in range(21))
"""What an id may stand for unless it is given: block sizes are powers of two."""


class IdSize:
    """Narrows the size down line by line, and never guesses: a wrong size would give wrong hit rates.

    Some formats name a last block that is not full, some do not; a trace does either in all its lines. Not thread-safe.
    """

    def __init__(self, given: int | None = None) -> None:
        """`given` tokens, or whatever fits all lines. Raises `ConfigError` for a number that cannot be."""
        if given is not None and given < 1:
            raise ConfigError(f"--tokens-per-id must be at least 1, got {given}")
        self._is_given = given is not None
        sizes = SIZES if given is None else (given,)
        self._candidates = [(tokens, names_last) for tokens in sizes for names_last in (True, False)]

    @property
    def tokens(self) -> int | None:
        """Tokens per id, once one size is left."""
        sizes = {tokens for tokens, _ in self._candidates}
        return sizes.pop() if len(sizes) == 1 else None

    @property
    def possible(self) -> list[int]:
        """The sizes that are left, ascending."""
        return sorted({tokens for tokens, _ in self._candidates})

    def add(self, num_tokens: int, num_ids: int, stated: int | None) -> str | None:
        """Take a line: a prompt of `num_tokens` that `num_ids` ids name, and the size that the line itself states.

        Returns what is wrong with it, or None; a wrong line changes nothing. O(sizes that are left).
        """
        agreeing = [each for each in self._candidates if stated in (None, each[0])]
        if not agreeing:
            return f"tokens_per_id is {stated}, and {self._shown()} in the lines before"
        left = [(size, last) for size, last in agreeing if _num_ids(num_tokens, size, names_last=last) == num_ids]
        if left:
            self._candidates = left
            return None
        return self._complaint(num_tokens, num_ids, {size for size, _ in agreeing})

    def _complaint(self, num_tokens: int, num_ids: int, sizes: set[int]) -> str:
        if len(sizes) > 1:
            return (
                f"{num_tokens} input tokens and {num_ids} hash ids do not fit {self._shown()} tokens per id, "
                f"as the lines before do: give --tokens-per-id"
            )
        (size,) = sizes
        expected = sorted({_num_ids(num_tokens, size, names_last=last) for _, last in self._candidates})
        wanted = " or ".join(map(str, expected))
        hint = "" if self._is_given else "; another size needs --tokens-per-id"
        return f"{num_tokens} input tokens need {wanted} hash ids of {size} tokens, got {num_ids}{hint}"

    def _shown(self) -> str:
        return "a power of two" if len(self.possible) == len(SIZES) else " or ".join(map(str, self.possible))


def _num_ids(num_tokens: int, tokens_per_id: int, *, names_last: bool) -> int:
    return -(-num_tokens // tokens_per_id) if names_last else num_tokens // tokens_per_id
