"""The worker's loop between two batches, and how a batch is dropped."""

import os
import signal
from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.contract.messages import WorkerReport
from fastdeploy_kvcache_v1.errors import ConfigError, ModelError
from fastdeploy_kvcache_v1.lab.model.ranks import ONE_RANK
from fastdeploy_kvcache_v1.lab.model.step import LayerComputed
from fastdeploy_kvcache_v1.lab.server.settings import ServerConfig
from fastdeploy_kvcache_v1.lab.server.worker import process
from fastdeploy_kvcache_v1.lab.server.worker.messages import WorkerLaunch
from fastdeploy_kvcache_v1.lab.server.worker.process import OPEN_COPIES_POLL_S, _build, _loop


class Idle:
    """A runner without reports, and a pipe over which nothing comes until a wait without end: then the stop."""

    has_open_copies = False

    def __init__(self):
        self.waits = []

    def take_report(self):
        return WorkerReport()

    def poll(self, timeout):
        self.waits.append(timeout)
        return timeout is None

    def recv(self):
        return None


def test_ended_copies_are_waited_for_until_they_are_reported():
    idle = Idle()
    idle.has_open_copies = True
    reports = iter([True, False])

    def take_report():
        idle.has_open_copies = next(reports)
        return WorkerReport()

    idle.take_report = take_report
    _loop(idle, idle, None, process.Stop())
    assert idle.waits == [OPEN_COPIES_POLL_S, OPEN_COPIES_POLL_S, None]


class Computing:
    """A runner whose batches take until a signal, if there is one."""

    def __init__(self, *signals):
        self.signals = signals
        self.num_ended = 0

    def run(self, batch):
        try:
            for number in self.signals:
                os.kill(os.getpid(), number)
        except Exception:
            pytest.fail("an edge in the runner took the stop for a failed batch")
        self.num_ended += 1
        return batch


@pytest.fixture
def stop():
    stop = process.Stop()
    before = signal.signal(signal.SIGUSR1, stop)
    yield stop
    signal.signal(signal.SIGUSR1, before)


def test_stop_signal_drops_the_batch_that_is_computed_and_all_later_ones(stop):
    runner = Computing(signal.SIGUSR1)
    for _ in range(2):
        with pytest.raises(process.BatchDroppedError):
            stop.compute(runner, "batch")
    assert runner.num_ended == 0


def test_stop_signal_between_batches_interrupts_nothing_but_the_next_one(stop):
    runner = Computing()
    assert stop.compute(runner, "batch") == "batch"
    os.kill(os.getpid(), signal.SIGUSR1)
    with pytest.raises(process.BatchDroppedError):
        stop.compute(runner, "batch")
    assert runner.num_ended == 1


def test_engine_is_told_once_a_second_that_layers_are_computed(monkeypatch):
    told, now = [], [1000.0]
    link = SimpleNamespace(send=told.append)
    monkeypatch.setattr(process.time, "monotonic", lambda: now[0])
    signs = process.SignsOfLife(link)
    for now[0], num_told in [(1000.0, 1), (1000.5, 1), (1001.0, 2), (1001.9, 2), (1007.0, 3), (1007.1, 3)]:
        signs.layer_computed()
        assert told == [LayerComputed()] * num_told


def test_model_is_loaded_for_max_model_len_and_threads_of_the_server(monkeypatch):
    def load(path, config, layout, ranks):
        raise ModelError(f"loaded for {config.max_position}")

    monkeypatch.setattr(process, "load_model", load)
    asked = []
    monkeypatch.setattr(process, "configure_reproducible_math", asked.append)
    config = ServerConfig(cache=KVCacheConfig(8), max_model_len=77, threads=3)
    with pytest.raises(ModelError, match="loaded for 77"):
        _build(WorkerLaunch(config=config), ONE_RANK, process.SignsOfLife(None))
    assert asked == [3]


def test_missing_libgomp_is_a_users_error_that_says_what_to_install(monkeypatch):
    def without_libgomp(name):
        raise ImportError("libgomp.so.1: cannot open shared object file: No such file or directory")

    monkeypatch.setattr(process.importlib, "import_module", without_libgomp)
    with pytest.raises(ConfigError, match=r"libgomp\.so\.1.*: apt-get install libgomp1$"):
        process._import_paddle()
