"""Geometry: what two ranks must agree on before one reads the other's blocks, and which bytes of a block go where."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ..attention.base import CacheLayout
from ..errors import ConfigError, PeerRefusedError

__all__ = ["PROTOCOL_VERSION", "Geometry", "Piece", "RoleGeometry", "pieces", "require_compatible", "source_ranks"]

PROTOCOL_VERSION = 1
"""Of everything that prefill and decode workers say to each other."""


@dataclass(frozen=True)
class RoleGeometry:
    """One tensor of a layer on one rank."""

    role: str
    dtype: str
    block_bytes: int
    num_heads: int | None
    """Heads in a block, the outermost axis of its bytes; None where every rank holds the whole block."""

    @property
    def unit_bytes(self) -> int:
        """Bytes of one head, or of the whole block: the same on every rank."""
        return self.block_bytes // (self.num_heads or 1)


@dataclass(frozen=True)
class Geometry:
    """The cache of one tensor parallel rank. Every layer has the same roles; draft layers count as layers."""

    model: str
    """Digest of the weights and of the settings that decide what they compute."""
    block_size: int
    """Tokens of a block."""
    num_layers: int
    roles: tuple[RoleGeometry, ...]
    num_kv_heads: int | None
    """Of the model, all ranks together; None where no role is split by heads."""
    tp_size: int
    tp_rank: int
    version: int = PROTOCOL_VERSION

    @classmethod
    def of(
        cls,
        layout: CacheLayout,
        *,
        model: str,
        block_size: int,
        tp_size: int = 1,
        tp_rank: int = 0,
        num_kv_heads: int | None = None,
    ) -> Geometry:
        """That of a rank's `layout`. `num_kv_heads`: of the whole model, None for latent caches, which are not split.

        Raises `ConfigError` where the layout does not hold this rank's part of the heads.
        """
        if not 0 <= tp_rank < tp_size:
            raise ConfigError(f"tensor parallel rank {tp_rank} is not in [0, {tp_size})")
        heads = None if num_kv_heads is None else len(_heads_of(num_kv_heads, tp_size, tp_rank))
        for role in layout.roles:
            if heads is not None and role.block_shape[0] != heads:
                raise ConfigError(
                    f"rank {tp_rank} of {tp_size} holds {heads} of {num_kv_heads} KV heads, but a block of role "
                    f"{role.role} has the shape {role.block_shape}: give the number of KV heads of the whole model"
                )
        roles = tuple(RoleGeometry(role.role, role.dtype, role.block_bytes, heads) for role in layout.roles)
        return cls(model, block_size, layout.num_layers, roles, num_kv_heads, tp_size, tp_rank)

    @property
    def heads(self) -> range:
        """The model's KV heads that this rank holds; empty where no role is split."""
        return range(0) if self.num_kv_heads is None else _heads_of(self.num_kv_heads, self.tp_size, self.tp_rank)


class Piece(NamedTuple):
    """Neighbouring bytes of one role's block that the target reads from one source rank, in every layer."""

    role: int
    """Place in `Geometry.roles`."""
    source_offset: int
    """In bytes, within the source's block."""
    target_offset: int
    """In bytes, within the target's block."""
    num_bytes: int


def _heads_of(num_kv_heads: int, tp_size: int, rank: int) -> range:
    """Ranks share the heads evenly; where there are more ranks than heads, neighbouring ranks hold the same one."""
    small, large = sorted((num_kv_heads, tp_size))
    if small < 1 or large % small:
        raise ConfigError(f"{num_kv_heads} KV heads cannot be shared by {tp_size} ranks: one must divide the other")
    if num_kv_heads >= tp_size:
        count = num_kv_heads // tp_size
        return range(rank * count, (rank + 1) * count)
    head = rank // (tp_size // num_kv_heads)
    return range(head, head + 1)


def require_compatible(ours: Geometry, theirs: Geometry) -> None:
    """Raises `PeerRefusedError`, naming both values, unless blocks of one can be read into the other."""
    for what, our_value, their_value in _compared(ours, theirs):
        if our_value != their_value:
            raise PeerRefusedError(
                f"{what} is {our_value!r} here and {their_value!r} on the peer: start both servers with the same "
                "model, the same cache settings and the same version of fastdeploy-kvcache-v1"
            )
    _require_possible(theirs)


def _require_possible(theirs: Geometry) -> None:
    """What a peer says decides which bytes are read, so it is checked like everything from a network."""
    if not 0 <= theirs.tp_rank < theirs.tp_size:
        raise PeerRefusedError(f"the peer says that it is rank {theirs.tp_rank} of {theirs.tp_size}")
    try:
        heads = None if theirs.num_kv_heads is None else len(theirs.heads)
    except ConfigError as error:
        raise PeerRefusedError(f"the peer's cache cannot exist: {error}") from None
    for role in theirs.roles:
        if role.num_heads != heads or role.block_bytes != role.unit_bytes * (heads or 1):
            raise PeerRefusedError(
                f"the peer says that its block of role {role.role} has {role.block_bytes} bytes and {role.num_heads} "
                f"heads; rank {theirs.tp_rank} of {theirs.tp_size} holds {heads}"
            )


def _compared(ours: Geometry, theirs: Geometry) -> Iterator[tuple[str, object, object]]:
    yield "the protocol version", ours.version, theirs.version
    yield "the model", ours.model, theirs.model
    yield "the block size", ours.block_size, theirs.block_size
    yield "the number of layers", ours.num_layers, theirs.num_layers
    yield "the roles", [role.role for role in ours.roles], [role.role for role in theirs.roles]
    yield "the number of KV heads", ours.num_kv_heads, theirs.num_kv_heads
    for our_role, their_role in zip(ours.roles, theirs.roles, strict=False):
        yield f"the dtype of role {our_role.role}", our_role.dtype, their_role.dtype
        is_split = our_role.num_heads is not None, their_role.num_heads is not None
        yield f"whether role {our_role.role} is split by heads", *is_split
        yield f"the bytes of role {our_role.role} per head", our_role.unit_bytes, their_role.unit_bytes


def source_ranks(target: Geometry, source_tp_size: int) -> list[int]:
    """Ranks of a source with `source_tp_size` ranks that `target` reads from, in order."""
    if target.num_kv_heads is None:
        return [target.tp_rank % source_tp_size]
    return sorted({_source_of(head, target, source_tp_size) for head in target.heads})


def pieces(source: Geometry, target: Geometry) -> tuple[Piece, ...]:
    """What `target` reads from the rank `source`. The pieces of all source ranks fill each of target's blocks once.

    Both are compatible. Where several source ranks hold a head, targets spread over them.
    """
    if target.num_kv_heads is None:
        if source.tp_rank != target.tp_rank % source.tp_size:
            return ()
        return tuple(Piece(number, 0, 0, role.block_bytes) for number, role in enumerate(target.roles))
    wanted = [head for head in target.heads if _source_of(head, target, source.tp_size) == source.tp_rank]
    if not wanted:
        return ()
    # Both hold neighbouring heads, so what they share is one range.
    first, count = wanted[0], len(wanted)
    return tuple(
        Piece(
            number,
            (first - source.heads.start) * role.unit_bytes,
            (first - target.heads.start) * role.unit_bytes,
            count * role.unit_bytes,
        )
        for number, role in enumerate(target.roles)
    )


def _source_of(head: int, target: Geometry, source_tp_size: int) -> int:
    """The source rank that `target` reads `head` from."""
    assert target.num_kv_heads is not None
    if target.num_kv_heads >= source_tp_size:
        return head // (target.num_kv_heads // source_tp_size)
    copies = source_tp_size // target.num_kv_heads
    return head * copies + target.tp_rank % copies
