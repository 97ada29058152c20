"""SessionTable: which requests continue which ones, as clients tell or as their prompts show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...contract.messages import BlockHash
from ..invariants import expect
from ..run import Owner
from .watched import DEPTHS, IN_USE, last_watched

MOST_SESSIONS = 1 << 16

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


class SessionTable:
    """The sessions that ended last, at most `MOST_SESSIONS`. Not thread-safe."""

    def __init__(self) -> None:
        self._by_end: dict[bytes, Session] = {}
        self._by_name: dict[bytes, Session] = {}
        self._marks: dict[bytes, None] = {}
        """Last watched blocks of the prompts of sessions."""

    def __len__(self) -> int:
        return len(self._by_end)

    def named(self, name: bytes) -> Session | None:
        """Return the session with this name that was used last. O(1)."""
        return self._by_name.get(name)

    def continued(self, hashes: Sequence[BlockHash], num_watched: int) -> Session | None:
        """Return a session whose newest prompt ended on one of `hashes`, the deepest such block as a rule. The first
        `num_watched` watched blocks of the prompt are known.

        Looks at watched depths first, then at the blocks between the deepest known one and the next. O(log hashes)
        lookups, and O(hashes) at worst.
        """
        by_end, marks, limit = self._by_end, self._marks, min(len(hashes), DEPTHS[num_watched] - 1)
        for depth in reversed(DEPTHS[:num_watched]):
            if hashes[depth - 1] in marks:
                end = next(filter(by_end.__contains__, reversed(hashes[depth - 1 : limit])), None)
                return None if end is None else by_end[end]
            limit = depth - 1
        return None

    def name(self, session: Session, name: bytes) -> None:
        """Let `session` be found as `name` from now on. O(1)."""
        session.name = name
        _remember(self._by_name, name, session)

    def ended(self, session: Session, hashes: Sequence[BlockHash], depth: int) -> None:
        """Record that a request of `session` has ended whose prompt has `depth` full blocks. O(1)."""
        by_end, end = self._by_end, hashes[depth - 1] if depth else b""
        if by_end.get(session.end) is session:
            del by_end[session.end]
        session.end, session.depth = end, depth
        if depth:
            _remember(by_end, end, session)
            _remember(self._marks, hashes[last_watched(depth) - 1], None)
        if session.name and self._by_name.get(session.name, session) is session:
            _remember(self._by_name, session.name, session)

    def check(self) -> None:
        """Raise `InvariantError` for a session whose last run is not its own, or cannot be found. O(sessions)."""
        for session in {*self._by_end.values(), *self._by_name.values()}:
            leaf = session.leaf
            expect(leaf is None or leaf.owner is session, "a session ends on a run of another one")
            is_lost = leaf is not None and (leaf.detached or not (leaf.on_device or leaf.host is not None))
            expect(not is_lost, "a session ends on a run that cannot be found")

    def forget(self) -> None:
        self._by_end.clear()
        self._by_name.clear()
        self._marks.clear()


def _remember(known: dict[bytes, Any], key: bytes, value: object) -> None:
    known.pop(key, None)  # the one used last is the last
    known[key] = value
    if len(known) > MOST_SESSIONS:
        del known[next(iter(known))]
