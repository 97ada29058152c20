"""StoredPrefixes: requests of a prefill server wait for their stored prefix before FastDeploy takes them up.

FastDeploy's threads take requests from its scheduler, give each a seat and blocks, and ask a decode server for room,
one after the other: one that waited there would hold up those behind it, and a seat here or blocks at decode. So a
request waits where it has neither, and the threads go on with others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

POLL_S = 0.005


class Store(Protocol):
    """What of `EngineStorage` lets requests go."""

    def holds(self, request_id: str) -> bool:
        """Whether a request of that id waits, or has waited and was not taken."""

    def take_released(self, most: int) -> list[Any]:
        """Up to `most` that wait no longer, in order of arrival. They are the caller's."""


class StoredPrefixes:
    """Thread-safe. `scheduler` is FastDeploy's LocalScheduler."""

    def __init__(
        self, scheduler: Any, store: Store, waits: Callable[[Any], bool], sleep: Callable[[float], None] = time.sleep
    ) -> None:
        """`waits(request)`: the store takes it, until its prefix is there or took too long."""
        self._scheduler = scheduler
        self._store = store
        self._waits = waits
        self._sleep = sleep
        self._taking = threading.Lock()

    def get_requests(self, take: Callable[..., list[Any]], *args: Any, batch: int = 1, **limits: Any) -> list[Any]:
        """In place of `take`, the scheduler's `get_requests`, which waits for seconds where nothing is new, while what
        waits here may go on.
        """
        ready = self._store.take_released(batch)
        if ready:
            return ready
        with self._taking:
            taken = take(*args, batch=batch, **limits) if self._has_new() else []
        if not taken:
            self._sleep(POLL_S)
        return [request for request in taken if not self._holds(request)]

    def _has_new(self) -> bool:
        with self._scheduler.mutex:
            return bool(self._scheduler.ids_read_cursor < len(self._scheduler.ids))

    def _holds(self, request: Any) -> bool:
        """Of two with one id the first waits."""
        return not self._store.holds(request.request_id) and self._waits(request)
