"""What `StorageBackend` promises, held to by every store."""

import pytest

from tests.mooncake_master import needs_mooncake
from tests.storage.values import VALUE_BYTES, empty, got, holds, keys, namespace, put, register, sealed, values

REAL_MOONCAKE = pytest.param("mooncake", marks=[pytest.mark.process, needs_mooncake()])


@pytest.fixture(params=["file", "mooncake stand-in", REAL_MOONCAKE])
def open_store(request, connecting):
    """Opens backends of one store, each with registered memory in `slots`, closed at the end, and again."""
    connect = connecting(request.param)

    def open_one(**changes):
        backend = connect(namespace(**changes))
        request.addfinalizer(lambda: (backend.close(), backend.close()))
        register(backend, 16)
        return backend

    return open_one


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


def test_buffers_may_lie_outside_the_memory_that_is_registered(open_store):
    backend = open_store()
    buffers = [*empty(1), backend.slots[0], *empty(1)]
    assert backend.put(keys(1, 2, 3), values(keys(1, 2, 3))) == 3
    assert backend.put(keys(2, 4), values(keys(2, 4))) == 1
    assert backend.get(keys(1, 2, 3), buffers) == 3
    assert all(holds(buffer, key) for buffer, key in zip(buffers, keys(1, 2, 3), strict=True))


def test_bytes_are_kept_whatever_their_name(open_store):
    backend = open_store()
    backend.put(keys(1), [sealed(keys(2)[0])])
    assert backend.get(keys(1), backend.slots[:1]) == 1
    assert holds(backend.slots[0], keys(2)[0])
