"""KeptHashes: hashes of requests whose match was given up. FastDeploy matches a waiting request again each step."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from ...errors import InvariantError
from .task_tokens import TaskTokens

KEPT_HASHES = 256


class KeptHashes:
    """By request id, the latest `KEPT_HASHES` of them. Not thread-safe: the adapter's lock covers it."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, TaskTokens] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, tokens: TaskTokens) -> None:
        self._kept[tokens.task.request_id] = tokens
        if len(self._kept) > KEPT_HASHES:
            self._kept.popitem(last=False)

    def look(self, task: Any) -> TaskTokens | None:
        """As they were when they were kept, and still kept."""
        tokens = self._kept.get(task.request_id)
        return tokens if tokens is not None and tokens.is_of(task) else None

    def take(self, task: Any) -> TaskTokens | None:
        """Up to date, and kept no longer."""
        tokens = self._kept.pop(task.request_id, None)
        if tokens is None or not tokens.is_of(task):
            return None
        tokens.catch_up()
        return tokens

    def end(self, request_id: str) -> None:
        """The request never comes back."""
        self._kept.pop(request_id, None)

    def clear(self) -> None:
        self._kept.clear()

    def check(self) -> None:
        """Raises `InvariantError`."""
        if len(self._kept) > KEPT_HASHES:
            raise InvariantError(f"adapter: it keeps the hashes of {len(self._kept)} requests")
