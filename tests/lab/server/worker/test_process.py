"""The worker's loop between two batches."""

import pytest

from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.contract.messages import WorkerReport
from fastdeploy_kvcache_v1.errors import ConfigError, ModelError
from fastdeploy_kvcache_v1.lab.model.ranks import ONE_RANK
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
    _loop(idle, idle)
    assert idle.waits == [OPEN_COPIES_POLL_S, OPEN_COPIES_POLL_S, None]


def test_the_model_is_loaded_for_the_longest_sequence_and_the_threads_of_the_server(monkeypatch):
    def load(path, config, layout, ranks):
        raise ModelError(f"loaded for {config.max_position}")

    monkeypatch.setattr(process, "load_model", load)
    asked = []
    monkeypatch.setattr(process, "configure_reproducible_math", asked.append)
    config = ServerConfig(cache=KVCacheConfig(8), max_model_len=77, threads=3)
    with pytest.raises(ModelError, match="loaded for 77"):
        _build(WorkerLaunch(config=config), ranks=ONE_RANK)
    assert asked == [3]


def test_a_system_without_libgomp_is_a_users_error_that_says_what_to_install(monkeypatch):
    def without_libgomp(name):
        raise ImportError("libgomp.so.1: cannot open shared object file: No such file or directory")

    monkeypatch.setattr(process.importlib, "import_module", without_libgomp)
    with pytest.raises(ConfigError, match=r"libgomp\.so\.1.*: apt-get install libgomp1$"):
        process._import_paddle()
