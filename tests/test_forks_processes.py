"""What a forked child finds: no lock of another thread, no socket of ours."""

import builtins
import logging
import socket
import subprocess
import sys
import threading
import time
from multiprocessing import Pipe
from types import ModuleType

import prometheus_client.values
import pytest

from fastdeploy_kvcache_v1 import forks

from .forked import ended_well, start

pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),  # of Python 3.12: it has threads, and forks
]

FORKS = 1000


@pytest.fixture(autouse=True)
def guard(monkeypatch):
    monkeypatch.setattr(forks, "LOGGING_WAIT_S", 0.2)
    forks.guard()


@pytest.fixture
def handler():
    handler = logging.StreamHandler()
    yield handler
    handler.close()


@pytest.fixture
def socket_of_ours():
    with socket.socket(socket.AF_UNIX) as each:
        yield forks.closed_in_children(each)


class Collector:
    """Of another package."""

    def __init__(self, name, lock):
        self._name, self._lock = name, lock

    def describe(self):
        return [prometheus_client.Metric(self._name, "", "gauge")]


def is_closed(each):
    return each.fileno() < 0


def others_can_take(lock):
    def take():
        if lock.acquire(blocking=False):
            taken.append(lock)
            lock.release()

    taken = []
    other = threading.Thread(target=take)
    other.start()
    other.join()
    return bool(taken)


def test_a_child_forked_under_load_waits_for_no_lock_and_has_no_socket():
    command = [sys.executable, "-m", "tests.fork_load", str(FORKS)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    assert (done.stdout, done.returncode) == (f"{FORKS} forks\n", 0)


def test_a_fork_does_not_wait_for_ever_for_a_log_that_waits_for_the_fork(handler):
    """Who writes holds the handler and wants logging's own lock, which the fork has."""
    holds, forked = threading.Event(), threading.Event()

    def write():
        with handler.lock:
            holds.set()
            forked.wait()

    writer = threading.Thread(target=write)
    writer.start()
    holds.wait()
    child = start(lambda: handler.lock.acquire())
    forked.set()
    writer.join()
    assert ended_well(child)
    assert others_can_take(handler.lock)
    assert others_can_take(logging._lock)


def test_a_fork_waits_until_what_is_opened_can_be_closed_in_the_child():
    holds, registered = threading.Event(), []

    def open_one():
        with forks.opening:
            holds.set()
            time.sleep(0.1)
            registered.append(True)

    def use():
        assert registered
        assert forks.opening.acquire(blocking=False)

    opener = threading.Thread(target=open_one)
    opener.start()
    holds.wait()
    child = start(use)
    opener.join()
    assert ended_well(child)
    assert others_can_take(forks.opening)


def test_a_fork_inside_a_log_line_leaves_the_lock_with_its_owner(handler):
    with handler.lock:
        assert ended_well(start(lambda: handler.lock.acquire()))
        assert not others_can_take(handler.lock)
    assert others_can_take(handler.lock)


def test_a_fork_gives_way_to_a_handler_that_takes_the_lock_of_logging(handler, monkeypatch):
    """As FastDeploy's LazyFileHandler does at its first line."""

    class Lock(type(handler.lock)):
        def acquire(self, **limit):
            wanted.set()
            return super().acquire(**limit)

    def write():
        with handler.lock:
            holds.set()
            wanted.wait()
            with logging._lock:
                lines.append("first")

    def use():
        assert lines == ["first"], "the fork went on without the handler"
        assert others_can_take(handler.lock)

    monkeypatch.setattr(forks, "LOGGING_WAIT_S", 10)
    holds, wanted, lines = threading.Event(), threading.Event(), []
    handler.lock = Lock()
    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    holds.wait()
    wanted.clear()
    assert ended_well(start(use))
    writer.join()
    assert others_can_take(handler.lock)
    assert others_can_take(logging._lock)


def test_a_fork_in_the_middle_of_an_import_imports_nothing(monkeypatch, socket_of_ours):
    """A child would wait for the lock of a module that another thread was importing."""

    def import_(name, *arguments, **named):
        imported.append(name)
        return original(name, *arguments, **named)

    def use():
        assert not imported
        assert is_closed(socket_of_ours)

    original, imported = builtins.__import__, []
    for name in "prometheus_client", "prometheus_client.values":
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(builtins, "__import__", import_)
    child = start(use)
    assert not imported
    assert ended_well(child)


def test_a_collector_with_a_lock_of_its_own_kind_keeps_no_lock_from_others(monkeypatch):
    registry, lock = prometheus_client.CollectorRegistry(), threading.Lock()
    registry.register(Collector("first", object()))
    registry.register(Collector("second", lock))
    monkeypatch.setattr(prometheus_client, "REGISTRY", registry)

    def use():
        assert lock.acquire(blocking=False)

    with lock:
        assert ended_well(start(use))


def test_a_child_that_cannot_renew_a_lock_closes_its_sockets(monkeypatch, socket_of_ours):
    class Broken:
        def _at_fork_reinit(self):
            raise RuntimeError

    def use():
        assert is_closed(socket_of_ours)

    monkeypatch.setattr(forks, "_renewed", [Broken()])
    assert ended_well(start(use))


def test_a_connection_is_closed_in_the_child_alone():
    ours, theirs = Pipe()
    forks.closed_in_children(ours)

    def use():
        assert ours.closed
        assert not theirs.closed

    assert ended_well(start(use))
    ours.send("still here")
    assert theirs.recv() == "still here"
    ours.close()
    theirs.close()


def test_the_lock_of_all_values_is_where_it_is_looked_for(monkeypatch, caplog):
    """With the lowest version and the locked one; where it is not there, a line says so."""
    values = prometheus_client.values.MultiProcessValue()
    monkeypatch.setattr(prometheus_client.values, "ValueClass", values)
    assert isinstance(forks.lock_of_values(), type(threading.Lock()))
    forks.look_for_lock_of_values()
    assert not caplog.records
    monkeypatch.setattr(values, "inc", lambda self, amount: None)
    forks.look_for_lock_of_values()
    assert "an API process may hang" in caplog.text
