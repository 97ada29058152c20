"""A master for each test, and backends on it that are closed at the end."""

import pytest

from fastdeploy_kvcache_v1.storage.mooncake import client
from fastdeploy_kvcache_v1.storage.mooncake.mooncake_backend import MooncakeBackend
from fastdeploy_kvcache_v1.storage.mooncake.settings import MooncakeSettings
from fastdeploy_kvcache_v1.storage.mooncake.share import give_memory, take_back_memory
from tests.mooncake_master import Master
from tests.storage.values import namespace, register


@pytest.fixture
def start_master(tmp_path):
    """Starts one with flags of its own."""
    masters = []

    def start(*flags):
        masters.append(Master(tmp_path, *flags))
        return masters[-1]

    yield start
    for each in masters:
        each.kill()


@pytest.fixture
def master(start_master):
    return start_master()


@pytest.fixture
def settings(master):
    return MooncakeSettings.read(master.environment())


@pytest.fixture
def store(settings, monkeypatch):
    """Opens backends as servers do, with memory of their own in `backend.slots`. The store has 64 MiB."""
    monkeypatch.setattr(client, "LEAVE_TIMEOUT_S", 0.0)
    give_memory(settings, 0)
    opened = []

    def open_store(count=16, backend_settings=settings, **changes):
        backend = MooncakeBackend(backend_settings, namespace(**changes))
        opened.append(backend)
        backend.slots = register(backend, count)
        return backend

    yield open_store
    for backend in opened:
        backend.close()
        backend.close()
    take_back_memory()
