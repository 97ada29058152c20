"""What runs before and after a fork, called without one."""

import logging
import sys
import threading
import time
import weakref
from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1 import forks


class Connection:
    is_closed = False

    def close(self):
        self.is_closed = True


def is_free(lock):
    """Whether another thread can take it."""
    taken = []

    def take():
        if lock.acquire(timeout=0):
            lock.release()
            taken.append(lock)

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return taken == [lock]


def test_hooks_are_registered_for_parent_and_child(monkeypatch):
    told = []
    monkeypatch.setattr("os.register_at_fork", lambda **hooks: told.append(hooks))
    forks.guard.__wrapped__()
    assert told == [
        {"before": forks._before, "after_in_parent": forks._after_in_parent, "after_in_child": forks._renew_locks},
        {"after_in_child": forks._close_sockets},
    ]


@pytest.mark.parametrize("is_busy", [False, True])
def test_fork_takes_the_locks_and_gives_them_back(monkeypatch, is_busy):
    monkeypatch.setattr(forks, "LOGGING_WAIT_S", 0.1)
    handler, done = logging.StreamHandler(), threading.Event()
    if is_busy:
        held = threading.Event()

        def hold():
            with handler.lock:
                held.set()
                done.wait(30)

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait(30)
    began = time.monotonic()
    forks._before()
    try:
        assert not is_free(forks.opening)
        assert not is_free(handler.lock)
        assert not is_free(vars(logging)["_lock"])
        assert not is_busy or time.monotonic() - began >= 0.1, "it has waited for the other thread"
    finally:
        forks._after_in_parent()
        done.set()
    if is_busy:
        thread.join()
    assert all(map(is_free, (forks.opening, handler.lock, vars(logging)["_lock"])))
    handler.close()


def test_child_has_free_locks_and_closed_connections(monkeypatch):
    monkeypatch.setattr(forks, "_renewed", weakref.WeakSet())
    monkeypatch.setattr(forks, "_closed", weakref.WeakSet())
    lock, connection = threading.Lock(), Connection()
    assert forks.renewed_in_children(lock) is lock
    assert forks.closed_in_children(connection) is connection
    lock.acquire()
    forks.opening.acquire()
    forks._renew_locks()
    assert is_free(lock)
    assert is_free(forks.opening)
    assert not connection.is_closed
    forks._close_sockets()
    assert connection.is_closed


def values(lock):
    def inc(self):
        return lock

    return SimpleNamespace(ValueClass=SimpleNamespace(inc=inc))


def test_lock_of_prometheus_values_is_found_in_its_closure(monkeypatch):
    lock = threading.Lock()
    monkeypatch.setitem(sys.modules, "prometheus_client.values", values(lock))
    assert forks.lock_of_values() is lock
    assert lock in forks._locks_of_prometheus()
    monkeypatch.setitem(sys.modules, "prometheus_client.values", SimpleNamespace())
    assert forks.lock_of_values() is None
