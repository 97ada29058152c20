"""Pause: a server with a role ends what it shares with its peers before FastDeploy empties its cache.

FastDeploy's own loops go on meanwhile, and its pause finds nothing left to end:

    decode    takes no request of a prefill server any more; each request that it has is aborted, and blocks come back
              when no rank writes to them any more
    prefill   asks no decode server for room any more; a request that has room is computed and read, and its first token
              sent; a lease of which nothing is heard is withdrawn
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from ...errors import CacheStateError
from .grants import ABORTED

logger = logging.getLogger(__name__)

PREFILL_PAUSED = "the prefill server is paused"
DECODE_PAUSED = "the decode server is paused"

POLL_S = 0.005
UNKNOWN_S = 1.0
"""How long a request that FastDeploy's scheduler knows may be on its way to its resource manager."""
STUCK_S = 60.0
"""Without a change for so long, a pause fails; FastDeploy's own waits for its workers as long."""


class Gate:
    """Whether this server begins anything with its peers. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_open = True
        self._num_held = 0

    @property
    def is_open(self) -> bool:
        return self._is_open and not self._num_held

    def close(self) -> None:
        """When this returns, nobody who found it open is passing any more."""
        with self._lock:
            self._is_open = False

    def open(self) -> None:
        with self._lock:
            self._is_open = True

    @contextmanager
    def passing(self) -> Iterator[bool]:
        """Whether it is open, which stays so for as long as the context lasts."""
        with self._lock:
            yield self.is_open

    @contextmanager
    def held_closed(self) -> Iterator[None]:
        """It is closed for as long as the context lasts; whether it is open afterwards is for others to say."""
        with self._lock:
            self._num_held += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_held -= 1


class Shared(Protocol):
    """What a role's cache manager shares with peers."""

    gate: Gate
    silence_s: float

    @property
    def num_shared(self) -> int:
        """Leases, or fetches and blocks that wait for the end of one. 0 when no peer reads, or is read."""

    def end(self, manager: Any) -> None:
        """Once per turn: have the requests of `manager` (FastDeploy's ResourceManagerV1) end."""

    def give_up(self, manager: Any) -> None:
        """Nothing has ended for `silence_s`."""


def end_requests(
    engine: Any,
    cache: Shared,
    output_class: Any,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Behind a closed gate: returns when no request of `engine` (FastDeploy's EngineService) is left, every client has
    its answer, and nothing is shared. On the thread that brings new requests, so that there are none.

    Raises `CacheStateError` when nothing has changed for a minute.
    """
    manager, scheduler = engine.resource_manager, engine.scheduler
    last, changed_at, gave_up_at = None, clock(), clock()
    while True:
        left = len(manager.requests), len(scheduler.requests), cache.num_shared
        if not any(left):
            return
        now = clock()
        if left != last:
            last, changed_at, gave_up_at = left, now, now
        if now - changed_at > STUCK_S:
            raise CacheStateError(
                f"{left[0]} requests and {left[2]} transfers have not ended for {STUCK_S:g} s: the server goes on; "
                "restart it if its workers hang"
            )
        cache.end(manager)
        if now - gave_up_at > cache.silence_s:
            gave_up_at = now
            cache.give_up(manager)
        if not (left[0] or left[2]) and now - changed_at > UNKNOWN_S:
            _answer(engine, output_class)
        sleep(POLL_S)


def _answer(engine: Any, output_class: Any) -> None:
    """Clients of requests that no server has taken up: their other half will not come."""
    unknown = [each for each in list(engine.scheduler.requests) if each not in engine.resource_manager.requests]
    logger.warning("requests %s end, because the server is paused", unknown)
    engine.scheduler.put_results(
        [
            output_class(request_id=each, finished=True, error_code=ABORTED, error_msg="Aborted: the server is paused")
            for each in unknown
        ]
    )
