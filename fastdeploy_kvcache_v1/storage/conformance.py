"""What `StorageBackend` promises, as tests that every store must pass: import all of them into a test file with pytest.

    from fastdeploy_kvcache_v1.storage.conformance import *

    @pytest.fixture
    def open_store():  # opens a backend of one empty store; several are open at a time, and closed at the end
        return lambda **changes: MyBackend(namespace(**changes))

A store that reads and writes registered memory alone lists writable views of `VALUE_BYTES` bytes in `backend.slots`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from ..attention.base import CacheLayout, RoleSpec
from ..contract.messages import BlockHash
from .base import StorageBackend, StoreKey
from .namespace import Namespace, block_key
from .seal import TRAILER_BYTES, is_sealed, seal

__all__ = [
    "VALUE_BYTES",
    "namespace",
    "test_a_value_is_written_once",
    "test_a_value_of_another_size_is_a_miss_and_is_stored_again",
    "test_another_connection_finds_what_was_stored",
    "test_buffers_may_lie_outside_the_memory_that_is_registered",
    "test_bytes_are_kept_whatever_their_name",
    "test_namespaces_never_meet",
    "test_values_come_back_as_far_as_they_are_stored",
    "test_values_that_are_touched_stay",
    "test_what_is_damaged_is_a_miss_and_is_stored_again",
    "test_what_is_removed_is_a_miss_even_while_it_is_in_use",
]

BLOCK_BYTES = 8192 - TRAILER_BYTES
VALUE_BYTES = BLOCK_BYTES + TRAILER_BYTES

Open = Callable[..., Any]


def namespace(**changes: object) -> Namespace:
    settings: dict[str, Any] = {
        "model": "m",
        "weight_epoch": "0",
        "layout": CacheLayout(2, (RoleSpec("key", (2, 4, 8), "float32"),)),
        "block_size": 4,
        "tensor_parallel_size": 1,
        "implementation": "test",
        "hash_version": "1",
    }
    return Namespace(**{**settings, **changes})


DIGEST = namespace().digest
"""Of the namespace that values are sealed for where a test does not say another."""


def block_hash(number: int) -> BlockHash:
    return BlockHash(hashlib.sha256(str(number).encode()).digest())


def keys(*numbers: int) -> list[StoreKey]:
    return [block_key(block_hash(number), 0) for number in numbers]


def content(key: StoreKey) -> bytes:
    return hashlib.shake_128(key.encode()).digest(BLOCK_BYTES)


def sealed(key: StoreKey, digest: str = DIGEST) -> memoryview:
    buffer = memoryview(bytearray(content(key)).ljust(VALUE_BYTES, b"\xff"))
    seal(buffer, key, namespace=digest)
    return buffer


def values(some: Sequence[StoreKey], digest: str = DIGEST) -> list[memoryview]:
    return [sealed(key, digest) for key in some]


def empty(count: int) -> list[memoryview]:
    return [memoryview(bytearray(VALUE_BYTES)) for _ in range(count)]


def holds(buffer: memoryview, key: StoreKey, digest: str = DIGEST) -> bool:
    return is_sealed(buffer, key, namespace=digest) and bytes(buffer[:BLOCK_BYTES]) == content(key)


def put(backend: StorageBackend, *numbers: int) -> int:
    buffers = slots(backend, len(numbers))
    for buffer, value in zip(buffers, values(keys(*numbers), backend.namespace_digest), strict=True):
        buffer[:] = value
    return backend.put(keys(*numbers), buffers)


def got(backend: StorageBackend, *numbers: int) -> int:
    """How many values arrived; checks each of them."""
    buffers = slots(backend, len(numbers))
    for buffer in buffers:
        buffer[:] = bytes(VALUE_BYTES)
    count = backend.get(keys(*numbers), buffers)
    digest = backend.namespace_digest
    assert all(holds(buffer, key, digest) for buffer, key in zip(buffers[:count], keys(*numbers), strict=False))
    return count


def slots(backend: StorageBackend, count: int) -> list[memoryview]:
    registered: list[memoryview] = getattr(backend, "slots", None) or empty(count)
    return registered[:count]


# ---- the tests


def test_values_come_back_as_far_as_they_are_stored(open_store: Open) -> None:
    backend = open_store()
    assert put(backend, 1, 2, 3, 5) == 4
    assert backend.count_stored(keys(1, 2, 3, 4, 5)) == 3
    assert got(backend, 1, 2, 3, 4, 5) == 3
    assert got(backend, 4) == 0
    assert backend.count_stored([]) == got(backend) == put(backend) == 0


def test_a_value_is_written_once(open_store: Open) -> None:
    backend = open_store()
    assert put(backend, 1, 2) == 2
    assert put(backend, 2, 3) == 1
    assert put(backend, 2, 3) == 0
    assert got(backend, 1, 2, 3) == 3


def test_another_connection_finds_what_was_stored(open_store: Open) -> None:
    first = open_store()
    put(first, 1, 2)
    assert got(open_store(), 1, 2) == 2
    first.close()
    assert got(open_store(), 1, 2) == 2


def test_namespaces_never_meet(open_store: Open) -> None:
    one = open_store()
    changes: list[dict[str, object]] = [{"weight_epoch": "1"}, {"model": "n"}, {"tensor_parallel_size": 2}]
    for number, change in enumerate(changes):
        other = open_store(**change)
        put(one, number)
        assert got(other, number) == other.count_stored(keys(number)) == 0
        assert put(other, number) == 1
        one.remove(keys(number))
        assert (got(one, number), got(other, number)) == (0, 1)


def test_a_value_of_another_size_is_a_miss_and_is_stored_again(open_store: Open) -> None:
    backend = open_store()
    for number, size in ((10, VALUE_BYTES - 64), (20, VALUE_BYTES + 64)):
        first, second = number, number + 1
        put(backend, first)
        backend.put(keys(second), [memoryview(bytearray(size)) if size > VALUE_BYTES else slots(backend, 2)[1][:size]])
        assert got(backend, first, second) == 1
        assert backend.count_stored(keys(first, second)) == 1
        assert put(backend, first, second) == 1
        assert got(backend, first, second) == 2


def test_what_is_removed_is_a_miss_even_while_it_is_in_use(open_store: Open) -> None:
    backend, other = open_store(), open_store()
    put(backend, 1, 2)
    assert got(other, 1, 2) == 2, "which is in use for a while now"
    backend.remove(keys(1, 3))
    assert [got(other, number) for number in (1, 2)] == [0, 1]
    assert put(backend, 1) == 1


def test_what_is_damaged_is_a_miss_and_is_stored_again(open_store: Open) -> None:
    backend = open_store()
    put(backend, 1, 2)
    backend.remove_damaged(keys(1, 3))
    assert [got(backend, number) for number in (1, 2)] == [0, 1]
    assert (put(backend, 1, 2), got(backend, 1, 2)) == (1, 2)


def test_values_that_are_touched_stay(open_store: Open) -> None:
    backend = open_store()
    put(backend, 1, 2)
    backend.touch(keys(1, 2, 3))
    assert backend.count_stored(keys(1, 2, 3)) == 2


def test_buffers_may_lie_outside_the_memory_that_is_registered(open_store: Open) -> None:
    backend = open_store()
    buffers = [*empty(1), *slots(backend, 1), *empty(1)]
    assert backend.put(keys(1, 2, 3), values(keys(1, 2, 3))) == 3
    assert backend.put(keys(2, 4), values(keys(2, 4))) == 1
    assert backend.get(keys(1, 2, 3), buffers) == 3
    assert all(holds(buffer, key) for buffer, key in zip(buffers, keys(1, 2, 3), strict=True))


def test_bytes_are_kept_whatever_their_name(open_store: Open) -> None:
    backend = open_store()
    backend.put(keys(1), [sealed(keys(2)[0])])
    (buffer,) = slots(backend, 1)
    assert backend.get(keys(1), [buffer]) == 1
    assert holds(buffer, keys(2)[0])
