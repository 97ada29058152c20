"""Shared by the storage tests: a namespace, and sealed blocks whose bytes follow from their key."""

from typing import Any

from fastdeploy_kvcache_v1.config import GIB
from fastdeploy_kvcache_v1.storage.base import SlotMemory, StorageBackend
from fastdeploy_kvcache_v1.storage.conformance import (
    BLOCK_BYTES,
    DIGEST,
    VALUE_BYTES,
    block_hash,
    content,
    empty,
    got,
    holds,
    keys,
    namespace,
    put,
    sealed,
    values,
)
from fastdeploy_kvcache_v1.storage.registry import store_kind
from fastdeploy_kvcache_v1.worker.ops import host_alloc

__all__ = [
    "BLOCK_BYTES",
    "DIGEST",
    "VALUE_BYTES",
    "block_hash",
    "content",
    "empty",
    "file_options",
    "got",
    "holds",
    "keys",
    "namespace",
    "put",
    "register",
    "sealed",
    "values",
]


def file_options(directory: object, capacity_bytes: int = 10 * GIB) -> dict[str, Any]:
    """Of settings of the `file` store."""
    given = {"kvcache_storage_dir": str(directory), "kvcache_storage_gib": capacity_bytes / GIB}
    return {flag.name: flag.default for flag in store_kind("file").flags} | given


def register(backend: StorageBackend, count: int) -> list[memoryview]:
    """Memory of `count` values that `backend` knows, as the host tier of a server; `put` and `got` use it."""
    buffer = host_alloc(count * VALUE_BYTES, shared=True)
    view = buffer.array.data
    backend.register(SlotMemory(view, VALUE_BYTES, buffer.file))
    backend.slots = [view[number * VALUE_BYTES :][:VALUE_BYTES] for number in range(count)]
    return backend.slots
