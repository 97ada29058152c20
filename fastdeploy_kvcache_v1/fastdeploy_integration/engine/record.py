"""Record: a FastDeploy request that the cache manager knows."""

from __future__ import annotations

from .task_tokens import TaskTokens


class Record:
    """Belongs to one request object, not to an id: ids come from clients. The adapter's lock covers it."""

    __slots__ = ("has_hole", "is_scheduled", "num_computed", "num_owned", "tokens")

    def __init__(self, tokens: TaskTokens, num_owned: int) -> None:
        self.tokens = tokens
        self.num_owned = num_owned
        """Leading entries of its block table that the manager holds."""
        self.num_computed = num_owned
        """Entries of these whose batches have reached the workers' queue."""
        self.is_scheduled = False
        self.has_hole = False
        """A batch with tokens of it was lost: later tokens are computed on a gap and are never cached."""
