"""What `StorageBackend` promises, held to by every store."""

import pytest

from fastdeploy_kvcache_v1.storage.file.file_backend import FileBackend
from fastdeploy_kvcache_v1.storage.mooncake import client
from fastdeploy_kvcache_v1.storage.mooncake.mooncake_backend import MooncakeBackend
from fastdeploy_kvcache_v1.storage.mooncake.settings import MooncakeSettings
from fastdeploy_kvcache_v1.storage.mooncake.share import take_back_memory
from tests.mooncake_master import Master, needs_mooncake
from tests.storage.values import VALUE_BYTES, holds, keys, namespace, register, values

SLOTS = 16


@pytest.fixture(params=["file", pytest.param("mooncake", marks=[pytest.mark.process, needs_mooncake()])])
def open_store(request, tmp_path, monkeypatch):
    """Opens backends of one store, each with registered memory in `slots`."""
    opened = []
    master = None
    if request.param == "mooncake":
        monkeypatch.setattr(client, "LEAVE_TIMEOUT_S", 0.0)
        master = Master(tmp_path)
        settings = MooncakeSettings.read(master.environment())

    def open_one(**changes):
        if master is None:
            backend = FileBackend(tmp_path / "kv", namespace(**changes), capacity_bytes=1 << 20)
        else:
            backend = MooncakeBackend(settings, namespace(**changes))
        opened.append(backend)
        backend.slots = register(backend, SLOTS)
        return backend

    yield open_one
    for backend in opened:
        backend.close()
        backend.close()
    take_back_memory()
    if master is not None:
        master.kill()


def put(backend, *numbers):
    buffers = backend.slots[: len(numbers)]
    for buffer, value in zip(buffers, values(keys(*numbers), backend.namespace_digest), strict=True):
        buffer[:] = value
    return backend.put(keys(*numbers), buffers)


def got(backend, *numbers):
    """How many values arrived; checks each of them."""
    buffers = backend.slots[: len(numbers)]
    for buffer in buffers:
        buffer[:] = bytes(VALUE_BYTES)
    count = backend.get(keys(*numbers), buffers)
    digest = backend.namespace_digest
    assert all(holds(buffer, key, digest) for buffer, key in zip(buffers[:count], keys(*numbers), strict=False))
    return count


def test_values_come_back_as_far_as_they_are_stored(open_store):
    backend = open_store()
    assert put(backend, 1, 2, 3, 5) == 4
    assert backend.count_stored(keys(1, 2, 3, 4, 5)) == 3
    assert got(backend, 1, 2, 3, 4, 5) == 3
    assert got(backend, 4) == 0
    assert backend.count_stored([]) == got(backend) == put(backend) == 0


def test_a_value_is_written_once(open_store):
    backend = open_store()
    assert put(backend, 1, 2) == 2
    assert put(backend, 2, 3) == 1
    assert put(backend, 2, 3) == 0
    assert got(backend, 1, 2, 3) == 3


def test_another_connection_finds_what_was_stored(open_store):
    first = open_store()
    put(first, 1, 2)
    assert got(open_store(), 1, 2) == 2
    first.close()
    assert got(open_store(), 1, 2) == 2


@pytest.mark.parametrize("change", [{"weight_epoch": "1"}, {"model": "n"}, {"tensor_parallel_size": 2}])
def test_namespaces_never_meet(open_store, change):
    one, other = open_store(), open_store(**change)
    put(one, 1)
    assert got(other, 1) == other.count_stored(keys(1)) == 0
    assert put(other, 1) == 1
    one.remove(keys(1))
    assert (got(one, 1), got(other, 1)) == (0, 1)


@pytest.mark.parametrize("size", [VALUE_BYTES - 64, VALUE_BYTES + 64])
def test_a_value_of_another_size_is_a_miss_and_is_stored_again(open_store, size):
    backend = open_store()
    put(backend, 1)
    backend.put(keys(2), [memoryview(bytearray(size))] if size > VALUE_BYTES else [backend.slots[1][:size]])
    assert got(backend, 1, 2) == 1
    assert backend.count_stored(keys(1, 2)) == 1
    assert put(backend, 1, 2) == 1
    assert got(backend, 1, 2) == 2


def test_what_is_removed_is_a_miss_even_while_it_is_in_use(open_store):
    backend, other = open_store(), open_store()
    put(backend, 1, 2)
    assert got(other, 1, 2) == 2, "which is in use for a while now"
    backend.remove(keys(1, 3))
    assert [got(other, number) for number in (1, 2)] == [0, 1]
    assert put(backend, 1) == 1


def test_values_that_are_touched_stay(open_store):
    backend = open_store()
    put(backend, 1, 2)
    backend.touch(keys(1, 2, 3))
    assert backend.count_stored(keys(1, 2, 3)) == 2
