"""Stores on real directories, closed at the end."""

import json

import pytest

from fastdeploy_kvcache_v1 import cli
from fastdeploy_kvcache_v1.storage.file.file_backend import FileBackend
from tests.storage.file.stores import FILE_BYTES, put
from tests.storage.values import namespace


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
def server(directory):
    """Opens a backend as a server does."""
    opened = []

    def open_server(*numbers, capacity=100 * FILE_BYTES, **changes):
        opened.append(FileBackend(directory, namespace(**changes), capacity_bytes=capacity))
        put(opened[-1], *numbers)
        return opened[-1]

    yield open_server
    for backend in opened:
        backend.close()


@pytest.fixture
def storage(directory, capsys):
    """Runs the command: exit status, and its result."""

    def run(*words):
        status = cli.main(["storage", *words, "--kvcache-storage-dir", str(directory), "--json"])
        return status, json.loads(capsys.readouterr().out)

    return run
