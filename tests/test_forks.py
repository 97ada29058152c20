"""What a forked child finds: no lock of another thread, no socket of ours."""

import logging
import subprocess
import sys
import threading
from multiprocessing import Pipe

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


def test_a_fork_inside_a_log_line_leaves_the_lock_with_its_owner(handler):
    with handler.lock:
        assert ended_well(start(lambda: handler.lock.acquire()))
        assert not others_can_take(handler.lock)
    assert others_can_take(handler.lock)


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
    assert "an API process may stand still" in caplog.text
