"""What the engine tells its workers about the storage, and where they meet."""

import os
from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.fastdeploy_integration import settings
from fastdeploy_kvcache_v1.storage.settings import STORAGE_FLAGS
from fastdeploy_kvcache_v1.switch import SESSION_VARIABLE, name_session


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in (settings.STORAGE_VARIABLE, "FILE_BACKEND_STORAGE_DIR", SESSION_VARIABLE):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)


def flags(backend="file", directory="/a", gib=1.0, prefetch="timeout"):
    given = {"kvcache_storage_backend": backend, "kvcache_storage_dir": directory, "storage_prefetch": prefetch}
    return SimpleNamespace(**{flag.name: flag.default for flag in STORAGE_FLAGS} | given | {"kvcache_storage_gib": gib})


WORKER = flags(directory=None, gib=None, prefetch=None)


def directory_of(given):
    return settings.storage_settings(given).options["kvcache_storage_dir"]


def export(storage, monkeypatch):
    environment = dict(os.environ)
    settings.export(None, storage, environment)
    for name in environment.keys() - os.environ.keys() | {settings.STORAGE_VARIABLE}:
        monkeypatch.setenv(name, environment[name])


def test_an_engine_has_its_own_flags_whatever_one_before_it_has_exported(monkeypatch):
    export(settings.storage_settings(flags()), monkeypatch)
    assert directory_of(flags(directory="/b", gib=5.0)) == "/b"
    with pytest.raises(ConfigError, match="--storage-prefetch must be one of"):
        settings.storage_settings(flags(prefetch="never"))


def test_fastdeploys_own_variable_names_the_directory(monkeypatch):
    monkeypatch.setenv("FILE_BACKEND_STORAGE_DIR", "/c")
    assert directory_of(flags(directory=None)) == "/c"
    assert directory_of(flags()) == "/a"


@pytest.mark.parametrize("exported", [None, ""])
def test_a_worker_that_was_told_nothing_says_so(monkeypatch, exported):
    if exported is not None:
        monkeypatch.setenv(settings.STORAGE_VARIABLE, exported)
    with pytest.raises(ConfigError, match="expected the engine's storage settings"):
        settings.storage_settings(WORKER)


def test_without_a_backend_there_is_no_storage(monkeypatch):
    export(None, monkeypatch)
    assert settings.storage_settings(flags(backend=None)) is None


def test_a_worker_of_a_killed_engine_meets_nobody(monkeypatch):
    words = []
    for _ in range(2):
        monkeypatch.delenv(SESSION_VARIABLE, raising=False)
        name_session()
        words.append(os.environ[SESSION_VARIABLE])
    assert words[0] != words[1]
    name_session()
    assert os.environ[SESSION_VARIABLE] == words[1], "data parallel engines have that of the first one"
