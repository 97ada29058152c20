"""GrantedPrefix: what a decode server found in its own cache for a request whose other blocks are being fetched."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from ...contract.messages import MatchResult
from ..engine.record import Record
from ..engine.task_tokens import TaskTokens

NO_STEP = -1


@dataclass(eq=False)
class Match:
    """A request that FastDeploy is about to give blocks: its cached blocks are pinned meanwhile."""

    request: Any
    tokens: TaskTokens
    found: MatchResult
    thread: int = field(default_factory=threading.get_ident)
    """FastDeploy asks for its room on this thread; other threads ask for other requests."""

    @property
    def num_on_device(self) -> int:
        """Blocks that need no slot."""
        return self.found.num_blocks - self.found.num_host_blocks

    @property
    def is_here(self) -> bool:
        return self.thread == threading.get_ident()


@dataclass(eq=False)
class GrantedPrefix:
    """Of a request from its blocks to its first batch. The adapter's lock covers it."""

    record: Record
    num_host_blocks: int = 0
    """Of its shared blocks: those that came from the host."""
    copied_by: int = NO_STEP
    """The step whose copies fill some of its blocks, until they were sent. Its fetch begins behind that step."""
    loss: str | None = None
    """Why its blocks do not hold what they should."""

    @property
    def num_blocks(self) -> int:
        """Leading blocks of its table that are shared."""
        return self.record.num_owned
