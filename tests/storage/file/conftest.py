"""Stores on real directories, closed at the end."""

import json

import pytest

from fastdeploy_kvcache_v1 import cli
from fastdeploy_kvcache_v1.storage.file.file_backend import FileBackend
from tests.storage.file.stores import FILE_BYTES
from tests.storage.values import namespace, put


@pytest.fixture
def store(tmp_path, request):
    def open_store(capacity=100 * FILE_BYTES, directory=tmp_path / "kv", **changes):
        backend = FileBackend(directory, namespace(**changes), capacity_bytes=capacity)
        request.addfinalizer(lambda: (backend.close(), backend.close()))
        return backend

    return open_store


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "kv"


@pytest.fixture
def server(store):
    """Opens a backend as a server does, and stores some values."""

    def open_server(*numbers, **changes):
        backend = store(**changes)
        put(backend, *numbers)
        return backend

    return open_server


@pytest.fixture
def storage(directory, capsys):
    """Runs the command: exit status, and its result."""

    def run(*words):
        status = cli.main(["storage", *words, "--kvcache-storage-dir", str(directory), "--json"])
        return status, json.loads(capsys.readouterr().out)

    return run
