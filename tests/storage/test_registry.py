"""Which stores can be named: ours, and those of installed packages."""

import os
import subprocess
import sys
from types import SimpleNamespace

import msgspec
import pytest

from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.storage import registry
from fastdeploy_kvcache_v1.storage.backends import check_settings
from fastdeploy_kvcache_v1.storage.registry import OURS, known_names, own_flags, store_kind
from fastdeploy_kvcache_v1.storage.settings import STORAGE_FLAGS, StorageSettings
from tests.storage.added_store import install_mine
from tests.storage.values import got, namespace, put


@pytest.fixture
def install(tmp_path, monkeypatch):
    """`install(mine="STORE")` installs a package with such entry points."""

    def forget():
        registry._added.cache_clear()
        store_kind.cache_clear()

    def install(**points):
        install_mine(tmp_path, **points)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "my_store", raising=False)
        forget()

    yield install
    monkeypatch.undo()
    forget()


def test_each_store_of_ours_is_described_under_its_name():
    assert known_names()[: len(OURS)] == list(OURS)
    assert [store_kind(name).name for name in OURS] == list(OURS)
    assert [name for name in OURS if store_kind(name).open is None] == ["attention_store"]


def test_store_of_an_installed_package_is_named_checked_and_opened(install):
    install(mine="STORE")
    assert known_names() == [*OURS, "mine"]
    settings = StorageSettings("mine")
    assert (settings.uses_device_tier, settings.flush_only) == (False, False)
    check_settings(settings)
    backend = settings.kind.open(settings, namespace())
    assert (put(backend, 1, 2), got(backend, 1, 2, 3)) == (2, 2)
    backend.close()
    import my_store

    assert my_store.checked == [None]


@pytest.mark.parametrize(
    ("points", "line"),
    [
        ({"mine": "MISSING"}, r"cannot load the store mine \(my_store:MISSING\): AttributeError"),
        ({"mine": "OTHER"}, "the entry point mine of fastdeploy_kvcache_v1.storage must be a StoreKind of that name"),
        ({"mine": "checked"}, r"must be a StoreKind of that name, got \[\]"),
        ({"mine": "WRONG"}, "the store mine has the flag --swap-space, expected a name that begins with kvcache_mine_"),
        ({}, "--kvcache-storage-backend must be one of file, mooncake, attention_store, got 'mine'"),
    ],
)
def test_store_that_cannot_be_loaded_is_refused_in_one_line(install, points, line):
    install(**points)
    with pytest.raises(ConfigError, match=line):
        StorageSettings("mine")
    assert "mine" not in own_flags()


def test_package_cannot_take_the_name_of_a_store_of_ours(install):
    install(file="OTHER")
    assert known_names() == list(OURS)
    assert store_kind("file").flags


@pytest.mark.process
@pytest.mark.parametrize(
    ("words", "status", "line"),
    [
        ("doctor --kvcache-storage-backend mine --kvcache-mine-room 5", None, "'kvcache_mine_room': 5"),
        ("doctor --kvcache-storage-backend mine", None, "{'kvcache_mine_room': 3, 'kvcache_mine_key': None}"),
        ("doctor --kvcache-storage-backend mine --kvcache-mine-room 0", 1, "--kvcache-mine-room must be a whole"),
        ("serve --kvcache-mine-room 5", 2, "--kvcache-mine-room needs --kvcache-storage-backend mine"),
        ("serve --help", 0, "rooms of the store (default: 3)"),
    ],
)
def test_commands_have_the_flags_of_an_installed_store(install, tmp_path, words, status, line):
    install(mine="STORE")
    command = [sys.executable, "-m", "fastdeploy_kvcache_v1.cli", *words.split()]
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    told = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path})
    assert line in told.stdout + told.stderr, told
    assert status in (None, told.returncode)


def test_flags_of_a_store_reach_it_and_the_process_that_serves_it(install):
    install(mine="STORE")
    values = {"kvcache_mine_room": 5, "kvcache_mine_key": "k"}
    given = {flag.name: flag.default for flag in STORAGE_FLAGS} | values | {"kvcache_storage_backend": "mine"}
    settings = StorageSettings.of_flags(SimpleNamespace(**given))
    assert settings.options == values
    assert StorageSettings(**msgspec.to_builtins(settings, enc_hook=str)) == settings
