"""Parts: how the bytes of a block are divided over the ranks, and so into stored values."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Parts"]


@dataclass(frozen=True)
class Parts:
    """Ranks that hold the same KV heads hold the same bytes, which are stored once: `num_parts` values a block."""

    num_ranks: int
    num_parts: int

    @classmethod
    def of(cls, num_ranks: int, num_kv_heads: int | None) -> Parts:
        """`num_kv_heads` of the whole model; None for a latent cache, which each rank holds as a whole."""
        num_parts = 1 if num_kv_heads is None else min(num_ranks, num_kv_heads)
        return cls(num_ranks, num_ranks if num_ranks % num_parts else num_parts)

    @property
    def each_rank(self) -> Parts:
        """A part for each rank."""
        return Parts(self.num_ranks, self.num_ranks)

    @property
    def are_shared(self) -> bool:
        """Several ranks hold one part."""
        return self.num_parts < self.num_ranks

    def holders(self, part: int) -> range:
        """Return the ranks that hold a part. It is written from the first one."""
        size = self.num_ranks // self.num_parts
        return range(part * size, (part + 1) * size)
