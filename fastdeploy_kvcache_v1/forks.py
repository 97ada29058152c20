"""Forks of a process with threads: a child never waits for a lock that a thread held, and keeps no socket of ours.

FastDeploy forks its API processes from the engine. The engine's threads do not exist in a child, so a lock that one of
them held would stay locked there for ever. After a fork these locks are free in the child:

    of prometheus_client, of the overlay    made anew: their data is per process, or whole at every moment
    of logging's handlers                   taken before the fork: while a thread holds one, Python may be inside the
                                            handler's file, which has its own lock that cannot be made anew

Our other locks guard objects of the engine that no child uses.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from functools import cache
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

LOGGING_WAIT_S = 10.0
"""Longest wait of a fork for threads that write to logs. Then it goes on: they may wait for the forking thread."""

LOCK_WAIT_S = 0.01
"""Longest wait of a fork for one handler while it holds logging's own lock."""

T = TypeVar("T")

opening = threading.Lock()
"""Held while something is opened and given to `closed_in_children`: no fork happens in between."""

_renewed: weakref.WeakSet[Any] = weakref.WeakSet()
_closed: weakref.WeakSet[Any] = weakref.WeakSet()
_held = threading.local()


@cache
def guard() -> None:
    """Guard every later `os.fork` of this process and of its children."""
    os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_renew_locks)
    os.register_at_fork(after_in_child=_close_sockets)  # a hook of its own, so that it runs if another one fails


def renewed_in_children(lock: T) -> T:
    """Register `lock`, a Lock or RLock, to be free in a child; returns it. Its data must be whole at every moment."""
    _renewed.add(lock)
    return lock


def closed_in_children(connection: T) -> T:
    """Register `connection`, whose `close` a child calls, and return it.

    Open it under `opening`, or a child that another thread forks meanwhile keeps it.
    """
    _closed.add(connection)
    return connection


def _before() -> None:
    deadline = time.monotonic() + LOGGING_WAIT_S
    while (busy := _take_logging_locks()) and (left := deadline - time.monotonic()) > 0:
        _give_back()  # logging's own lock too: FastDeploy's LazyFileHandler takes it while it holds the busy one
        if busy[0].acquire(timeout=left):
            busy[0].release()
    opening.acquire()


def _take_logging_locks() -> list[Any]:
    """Take the free locks of logging. Returns the busy ones."""
    own = vars(logging)["_lock"]
    own.acquire()  # without a timeout: logging takes it next, without one too
    _held.locks = [own]
    busy: list[Any] = []
    for handler in list(vars(logging)["_at_fork_reinit_lock_weakset"]):  # logging makes their locks anew in a child
        if handler.lock is not None:
            taken = handler.lock.acquire(timeout=LOCK_WAIT_S)
            (_held.locks if taken else busy).append(handler.lock)
    return busy


def _after_in_parent() -> None:
    opening.release()
    _give_back()


def _give_back() -> None:
    for lock in reversed(_held.locks):
        lock.release()


def _renew_locks() -> None:
    opening._at_fork_reinit()  # type: ignore[attr-defined]
    for lock in (*_renewed, *_locks_of_prometheus()):
        lock._at_fork_reinit()


def _close_sockets() -> None:
    for connection in _closed:
        connection.close()


def _locks_of_prometheus() -> Iterator[Any]:
    """Yield the locks. Imports nothing: an import that another thread had begun at the fork hangs in the child."""
    if (lock := lock_of_values()) is not None:
        yield lock
    registry = getattr(sys.modules.get("prometheus_client"), "REGISTRY", None)
    for owner in (registry, *getattr(registry, "_names_to_collectors", {}).values()):
        lock = getattr(owner, "_lock", None)
        if hasattr(lock, "_at_fork_reinit"):  # a collector of another package may have another kind of lock
            yield lock


def lock_of_values() -> Any | None:
    """Find the lock of all values in prometheus_client's multiprocess mode, which is in a closure.

    None in the other mode, in a version that keeps it elsewhere, and before prometheus_client is imported.
    """
    update: Any = getattr(getattr(sys.modules.get("prometheus_client.values"), "ValueClass", None), "inc", None)
    names = update.__code__.co_freevars if update is not None else ()
    return update.__closure__[names.index("lock")].cell_contents if "lock" in names else None


def look_for_lock_of_values() -> None:
    """Warn if a child may wait for ever, because `lock_of_values` finds no lock."""
    from prometheus_client import values

    if values.ValueClass._multiprocess and lock_of_values() is None:
        logger.warning(
            "found no lock of values in this prometheus_client, expected version 0.19 to 0.26: install one of these, "
            "or an API process may hang at its first request"
        )
