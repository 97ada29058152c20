"""SessionTable: which requests continue which ones, as clients tell or as their prompts show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...contract.messages import BlockHash
from ..invariants import expect
from ..run import Owner
from .watched import DEPTHS, IN_USE, last_watched

MOST_SESSIONS = 1 << 16

REWRITTEN_TOKENS = 511
"""At the end of a prompt, its session's next one may have others: reminders, the start of an answer."""

PIECE = 256
"""Blocks of a prompt that are looked up at once."""

NEVER = 1 << 62
"""Due time of a session that sends no more requests."""


class Session(Owner):
    """Requests of which each one continues the one before. It owns the blocks that no other session has used."""

    __slots__ = (
        "calls_tool",
        "claimed",
        "depth",
        "end",
        "is_believed",
        "last_use",
        "name",
        "num_blocks",
        "split",
        "stem",
        "stem_depth",
        "tenant",
        "told",
        "turns",
        "weight",
    )

    def __init__(self, turns: int = 0, tenant: bytes = b"") -> None:
        super().__init__()
        self.end = b""
        """Hash of the last full block of its newest prompt, at `depth` blocks. Empty before its first end."""
        self.depth = 0
        self.stem = b""
        """As `end`, without the blocks that the next prompt may rewrite. Empty for a short prompt."""
        self.stem_depth = 0
        self.split = 0
        """`stem_depth` of the prompt before."""
        self.name = b""
        """As told by its client last."""
        self.turns = turns
        """Ended requests, those of the session that it was forked from included."""
        self.last_use = IN_USE
        """End of its last request, in the time of `ReuseHistory`."""
        self.tenant = tenant
        self.told: int | None = None
        """Time at which it comes back as its client told, or `NEVER`."""
        self.claimed = 0
        """Wait that its client told first since its last use."""
        self.is_believed = False
        """What `told` says decides about evictions."""
        self.calls_tool = False
        self.weight = 0.0
        """Part of its blocks that it still owned after its last end."""
        self.num_blocks = 0
        """Own watched blocks at its last end."""

    def is_on(self, hashes: Sequence[BlockHash]) -> bool:
        """True if its newest prompt is a prefix of the prompt with these blocks."""
        depth = self.depth
        return not depth or (depth <= len(hashes) and hashes[depth - 1] == self.end)

    def has_stem(self, hashes: Sequence[BlockHash]) -> bool:
        """True if the prompt with these blocks rewrites the end of its newest prompt. Prompts that all leave the same
        prefix are no session: each one must share more than the one before.
        """
        depth = self.stem_depth
        return self.split < depth and self.depth < len(hashes) and hashes[depth - 1] == self.stem


class SessionTable:
    """The sessions that ended last, at most `MOST_SESSIONS`. Not thread-safe."""

    def __init__(self, block_size: int) -> None:
        self._num_rewritten = REWRITTEN_TOKENS // block_size
        self._by_end: dict[bytes, Session] = {}
        self._by_stem: dict[bytes, Session] = {}
        self._by_name: dict[bytes, Session] = {}
        self._marks: dict[bytes, None] = {}
        """Last watched blocks of the prompts and stems of sessions."""

    def __len__(self) -> int:
        return len(self._by_end)

    def named(self, name: bytes) -> Session | None:
        """Return the session with this name that was used last. O(1)."""
        return self._by_name.get(name)

    def continued(self, hashes: Sequence[BlockHash], num_watched: int) -> Session | None:
        """Return a session whose newest prompt, or its stem, ended on one of `hashes`, on the deepest such block as a
        rule. The first `num_watched` watched blocks of the prompt are known.

        Looks at watched depths first, then at the blocks between the deepest known one and the next. O(log hashes)
        lookups, and O(hashes) at worst.
        """
        marks, limit = self._marks, min(len(hashes), DEPTHS[num_watched] - 1)
        for depth in reversed(DEPTHS[:num_watched]):
            if hashes[depth - 1] in marks:
                begin = max(0, depth - 1 - self._num_rewritten)  # a stem may be above the mark of its end
                return self._deepest(hashes, begin, limit)
            limit = depth - 1
        return None

    def _deepest(self, hashes: Sequence[BlockHash], begin: int, end: int) -> Session | None:
        """Return the session of which the end, or the stem, is the deepest among blocks `[begin, end)`."""
        for last in range(end, begin, -PIECE):
            blocks = hashes[max(begin, last - PIECE) : last][::-1]
            found = next(filter(self._by_end.__contains__, blocks), None)
            above = len(blocks) if found is None else blocks.index(found)
            stem = next(filter(self._by_stem.__contains__, blocks[:above]), None)
            if stem is not None:
                return self._by_stem[stem]
            if found is not None:
                return self._by_end[found]
        return None

    def name(self, session: Session, name: bytes) -> None:
        """Let `session` be found as `name` from now on. O(1)."""
        session.name = name
        _remember(self._by_name, name, session)

    def ended(self, session: Session, hashes: Sequence[BlockHash], depth: int) -> None:
        """Record that a request of `session` has ended whose prompt has `depth` full blocks. O(1)."""
        stem_depth = max(0, depth - self._num_rewritten)
        session.split = session.stem_depth
        end = self._moved(self._by_end, session, session.end, hashes, depth)
        session.end, session.depth = end, depth
        stem = self._moved(self._by_stem, session, session.stem, hashes, stem_depth)
        session.stem, session.stem_depth = stem, stem_depth
        if session.name and self._by_name.get(session.name, session) is session:
            _remember(self._by_name, session.name, session)

    def _moved(
        self, known: dict[bytes, Session], session: Session, before: bytes, hashes: Sequence[BlockHash], depth: int
    ) -> bytes:
        """Let `session` be found at `depth` of a prompt instead of at the block `before`. Returns that block's hash."""
        if known.get(before) is session:
            del known[before]
        if not depth:
            return b""
        _remember(known, hashes[depth - 1], session)
        _remember(self._marks, hashes[last_watched(depth) - 1], None)
        return hashes[depth - 1]

    def check(self) -> None:
        """Raise `InvariantError` for a session whose last run is not its own, or cannot be found. O(sessions)."""
        for session in {*self._by_end.values(), *self._by_stem.values(), *self._by_name.values()}:
            leaf = session.leaf
            expect(leaf is None or leaf.owner is session, "a session ends on a run of another one")
            is_lost = leaf is not None and (leaf.detached or not (leaf.on_device or leaf.host is not None))
            expect(not is_lost, "a session ends on a run that cannot be found")

    def forget(self) -> None:
        self._by_end.clear()
        self._by_stem.clear()
        self._by_name.clear()
        self._marks.clear()


def _remember(known: dict[bytes, Any], key: bytes, value: object) -> None:
    known.pop(key, None)  # the one used last is the last
    known[key] = value
    if len(known) > MOST_SESSIONS:
        del known[next(iter(known))]
