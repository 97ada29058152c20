"""Forks of a process with threads: no child waits for a lock that a thread held, and none keeps a socket of ours.

FastDeploy forks its API processes from the engine, and the engine's threads stay behind: a lock that one of them held
would stay locked in the child for ever. After a fork these locks are free in the child, whoever held them:

    of prometheus_client, the overlay's     made anew: what they guard is written anew for each process, or whole
    of logging's handlers                   taken before the fork: one that is held may mean that Python is inside its
                                            file, whose own lock nobody can make anew

Other locks of ours guard objects of the engine that no child uses.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

SOCKET_DIRECTORIES = "fd-kvcache-"
"""How the names of directories begin that hold only sockets of ours."""

LOGGING_WAIT_S = 10.0
"""How long a fork waits for those who write to logs. Then it goes on: who writes may be waiting for who forks."""

LOCK_WAIT_S = 0.01
"""How long a fork waits for one handler while it holds logging's own lock."""

T = TypeVar("T")

_renewed: weakref.WeakSet[Any] = weakref.WeakSet()
_closed: weakref.WeakSet[Any] = weakref.WeakSet()
_held = threading.local()


@cache
def guard() -> None:
    """From here on, for every `os.fork` of this process and of its children."""
    os.register_at_fork(before=_before, after_in_parent=_give_back, after_in_child=_renew_locks)
    os.register_at_fork(after_in_child=_close_sockets)  # a hook of its own, which runs also where another one fails


def renewed_in_children(lock: T) -> T:
    """`lock`, a Lock or RLock, which a child finds free. What it guards must be whole at every moment."""
    _renewed.add(lock)
    return lock


def closed_in_children(connection: T) -> T:
    """`connection`, whose `close` a child calls. For what has no name in `SOCKET_DIRECTORIES`."""
    _closed.add(connection)
    return connection


def _before() -> None:
    deadline = time.monotonic() + LOGGING_WAIT_S
    while (busy := _take_those_of_logging()) and (left := deadline - time.monotonic()) > 0:
        _give_back()  # logging's own as well: FastDeploy's LazyFileHandler wants it while it holds the one we wait for
        if busy[0].acquire(timeout=left):
            busy[0].release()


def _take_those_of_logging() -> list[Any]:
    """Takes the free ones. Returns the others."""
    own = vars(logging)["_lock"]
    own.acquire()  # without a limit: logging takes it next, and has none
    _held.locks = [own]
    busy: list[Any] = []
    for handler in list(vars(logging)["_at_fork_reinit_lock_weakset"]):  # whose locks logging makes anew in a child
        if handler.lock is not None:
            taken = handler.lock.acquire(timeout=LOCK_WAIT_S)
            (_held.locks if taken else busy).append(handler.lock)
    return busy


def _give_back() -> None:
    for lock in reversed(_held.locks):
        lock.release()


def _renew_locks() -> None:
    for lock in (*_renewed, *_locks_of_prometheus()):
        lock._at_fork_reinit()


def _close_sockets() -> None:
    for connection in _closed:
        connection.close()
    _close_named_sockets()


def _locks_of_prometheus() -> Iterator[Any]:
    """Imports nothing: a thread that imports it at the fork holds the lock of the module for ever, for a child."""
    if (lock := lock_of_values()) is not None:
        yield lock
    registry = getattr(sys.modules.get("prometheus_client"), "REGISTRY", None)
    for owner in (registry, *getattr(registry, "_names_to_collectors", {}).values()):
        lock = getattr(owner, "_lock", None)
        if hasattr(lock, "_at_fork_reinit"):  # a collector of another package may have a lock of another kind
            yield lock


def lock_of_values() -> Any | None:
    """The one lock that prometheus_client has for all values in its multiprocess mode, in a closure.

    None in the other mode, where another version keeps it elsewhere, and before it is imported.
    """
    update: Any = getattr(getattr(sys.modules.get("prometheus_client.values"), "ValueClass", None), "inc", None)
    names = update.__code__.co_freevars if update is not None else ()
    return update.__closure__[names.index("lock")].cell_contents if "lock" in names else None


def look_for_lock_of_values() -> None:
    """Warns where a child may wait for ever."""
    from prometheus_client import values

    if values.ValueClass._multiprocess and lock_of_values() is None:
        logger.warning(
            "got a prometheus_client that keeps the lock of its values in an unknown place, expected 0.19 to 0.26: "
            "install one of these, or an API process may stand still at its first request"
        )


def _close_named_sockets() -> None:
    """Those of ZeroMQ, which opens some on threads of its own and knows nothing of forks."""
    default = socket.getdefaulttimeout()
    socket.setdefaulttimeout(None)  # with one, socket.socket makes a foreign file non-blocking, in the parent as well
    try:
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # no socket, or not open any more
                each = socket.socket(fileno=int(name))
                is_ours = any(map(_is_ours, _names(each)))
                descriptor = each.detach()  # a socket object that is dropped closes its file
                if is_ours:
                    os.close(descriptor)
    finally:
        socket.setdefaulttimeout(default)


def _names(each: socket.socket) -> Iterator[object]:
    for name_of in (each.getsockname, each.getpeername):
        with contextlib.suppress(OSError):  # not connected, or of a family without names
            yield name_of()


def _is_ours(name: object) -> bool:
    return isinstance(name, str) and Path(name).parent.name.startswith(SOCKET_DIRECTORIES)
