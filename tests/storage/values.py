"""Shared by the storage tests: a namespace, and sealed blocks whose bytes follow from their key."""

import hashlib
from collections.abc import Sequence

from fastdeploy_kvcache_v1.attention.base import CacheLayout, RoleSpec
from fastdeploy_kvcache_v1.contract.messages import BlockHash
from fastdeploy_kvcache_v1.storage.base import SlotMemory, StorageBackend, StoreKey
from fastdeploy_kvcache_v1.storage.namespace import Namespace, block_key
from fastdeploy_kvcache_v1.storage.seal import TRAILER_BYTES, is_sealed, seal
from fastdeploy_kvcache_v1.worker.ops import host_alloc

BLOCK_BYTES = 8192 - TRAILER_BYTES
VALUE_BYTES = BLOCK_BYTES + TRAILER_BYTES


def namespace(**changes: object) -> Namespace:
    settings: dict[str, object] = {
        "model": "m",
        "weight_epoch": "0",
        "layout": CacheLayout(2, (RoleSpec("key", (2, 4, 8), "float32"),)),
        "block_size": 4,
        "tensor_parallel_size": 1,
        "implementation": "test",
        "hash_version": "1",
    }
    return Namespace(**{**settings, **changes})  # type: ignore[arg-type]


DIGEST = namespace().digest
"""Of the namespace that values are sealed for where a test does not say another."""


def block_hash(number: int) -> BlockHash:
    return BlockHash(hashlib.sha256(str(number).encode()).digest())


def register(backend: StorageBackend, count: int) -> list[memoryview]:
    """Memory of `count` values that `backend` knows, as the host tier of a server; `put` and `got` use it."""
    buffer = host_alloc(count * VALUE_BYTES, shared=True)
    view = buffer.array.data
    backend.register(SlotMemory(view, VALUE_BYTES, buffer.file))
    backend.slots = [view[number * VALUE_BYTES :][:VALUE_BYTES] for number in range(count)]
    return backend.slots


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
    buffers = _buffers(backend, len(numbers))
    for buffer, value in zip(buffers, values(keys(*numbers), backend.namespace_digest), strict=True):
        buffer[:] = value
    return backend.put(keys(*numbers), buffers)


def got(backend: StorageBackend, *numbers: int) -> int:
    """How many values arrived; checks each of them."""
    buffers = _buffers(backend, len(numbers))
    for buffer in buffers:
        buffer[:] = bytes(VALUE_BYTES)
    count = backend.get(keys(*numbers), buffers)
    digest = backend.namespace_digest
    assert all(holds(buffer, key, digest) for buffer, key in zip(buffers[:count], keys(*numbers), strict=False))
    return count


def _buffers(backend: StorageBackend, count: int) -> list[memoryview]:
    slots: list[memoryview] = getattr(backend, "slots", None) or empty(count)
    return slots[:count]
