"""Stores on real directories, closed at the end."""

import json

import pytest

from fastdeploy_kvcache_v1 import cli
from fastdeploy_kvcache_v1.storage.file.file_backend import FileBackend
from tests.storage.file.stores import FILE_BYTES
from tests.storage.values import namespace, put


@pytest.fixture
def store(tmp_path):
    opened = []

    def open_store(capacity=100 * FILE_BYTES, directory=tmp_path / "kv", **changes):
        opened.append(FileBackend(directory, namespace(**changes), capacity_bytes=capacity))
        return opened[-1]

    yield open_store
    for backend in opened:
        backend.close()
        backend.close()


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
