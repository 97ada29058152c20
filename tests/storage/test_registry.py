"""Which stores can be named: ours, and those of installed packages."""

import sys

import pytest

from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.storage import registry
from fastdeploy_kvcache_v1.storage.backends import check_settings
from fastdeploy_kvcache_v1.storage.registry import GROUP, OURS, known_names, store_kind
from fastdeploy_kvcache_v1.storage.settings import StorageSettings
from tests.storage.values import got, namespace, put

PACKAGE = """
from pathlib import Path

from fastdeploy_kvcache_v1.storage.file.file_backend import FileBackend
from fastdeploy_kvcache_v1.storage.registry import StoreKind

checked = []

def open_it(chosen, namespace):
    return FileBackend(Path({directory!r}), namespace, capacity_bytes=chosen.capacity_bytes)

STORE = StoreKind("mine", open=open_it, check=lambda chosen, namespace: checked.append(namespace))
OTHER = StoreKind("other", open=open_it, check=print)
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """`install(mine="STORE")` installs a package with such entry points."""

    def forget():
        registry._added.cache_clear()
        store_kind.cache_clear()

    def install(**points):
        (tmp_path / "my_store.py").write_text(PACKAGE.format(directory=str(tmp_path / "kv")))
        installed = tmp_path / "my_store-1.0.dist-info"
        installed.mkdir()
        (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: my-store\nVersion: 1.0\n")
        lines = [f"{name} = my_store:{attribute}" for name, attribute in points.items()]
        (installed / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines]))
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
    settings = StorageSettings("mine", capacity_bytes=1 << 20)
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
        ({}, "--kvcache-storage-backend must be one of file, mooncake, attention_store, got 'mine'"),
    ],
)
def test_store_that_cannot_be_loaded_is_refused_in_one_line(install, points, line):
    install(**points)
    with pytest.raises(ConfigError, match=line):
        StorageSettings("mine")


def test_package_cannot_take_the_name_of_a_store_of_ours(install):
    install(file="OTHER")
    assert known_names() == list(OURS)
    assert store_kind("file").has_directory
