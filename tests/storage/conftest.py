"""Stores of every kind."""

import pytest

from fastdeploy_kvcache_v1.storage.file.file_backend import FileBackend
from fastdeploy_kvcache_v1.storage.mooncake import client, share
from fastdeploy_kvcache_v1.storage.mooncake.mooncake_backend import MooncakeBackend
from fastdeploy_kvcache_v1.storage.mooncake.settings import MooncakeSettings
from tests.mooncake_master import Master
from tests.storage.attention_store.stand_in import installed
from tests.storage.machines import DeviceMachine
from tests.storage.mooncake.stand_in import SETTINGS, Cluster, give_now


@pytest.fixture
def cluster(monkeypatch):
    """FAKE Mooncake, for this process."""
    monkeypatch.setattr(share, "_given", {})
    cluster = Cluster()
    cluster.install(monkeypatch)
    yield cluster
    share.take_back_memory()


@pytest.fixture
def connecting(request, tmp_path, monkeypatch):
    """`connecting(store)(namespace)` opens a backend of the store that has this name."""
    masters = []

    def of(store):
        if store == "file":
            return lambda space: FileBackend(tmp_path / "kv", space, capacity_bytes=1 << 30)
        if store == "mooncake stand-in":
            request.getfixturevalue("cluster")
            give_now(SETTINGS)
            return lambda space: MooncakeBackend(SETTINGS, space)
        monkeypatch.setattr(client, "LEAVE_TIMEOUT_S", 0.0)
        masters.append(Master(tmp_path))
        settings = MooncakeSettings.read(masters[0].environment())
        give_now(settings)
        return lambda space: MooncakeBackend(settings, space)

    yield of
    share.take_back_memory()
    for each in masters:
        each.kill()


@pytest.fixture
def start_machine(request, sdk_store):
    """`start_machine(ranks=2)`: servers on one attention store, closed at the end."""

    def start(**options):
        made = DeviceMachine(sdk_store, **options)
        request.addfinalizer(made.close)
        return made

    return start


@pytest.fixture
def sdk_store(tmp_path, monkeypatch):
    """The stand-in SDK of the attention store can be imported, and keeps what it stores there."""
    with installed(monkeypatch, tmp_path / "store") as directory:
        yield directory
