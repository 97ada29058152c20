"""Tries a store out: stores values as a server does, reads them back and removes them."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from pathlib import Path

from ..attention.base import CacheLayout, RoleSpec
from ..config import MIB
from ..contract.messages import BlockHash
from ..errors import StorageError
from .base import StorageBackend, StoreKey
from .namespace import Namespace, block_key
from .registry import Chosen, RoundTrip, StoreKind
from .seal import TRAILER_BYTES, is_sealed, seal

__all__ = ["NUM_BYTES", "trial_namespace", "try_directory", "try_mooncake", "try_store"]

NUM_VALUES = 64
VALUE_BYTES = MIB
NUM_BYTES = NUM_VALUES * VALUE_BYTES
LAYOUT = CacheLayout(1, (RoleSpec("key", (VALUE_BYTES - TRAILER_BYTES,), "uint8"),))


def try_store(kind: StoreKind, chosen: Chosen) -> RoundTrip:
    """In a namespace of its own. Raises `ConfigError` if it cannot be used, and `StorageError` if it does not work."""
    if kind.trial is not None:
        return kind.trial(chosen)
    assert kind.open is not None, "a store over the device tier brings a trial"
    return _round_trip(kind.open(chosen, trial_namespace(LAYOUT, block_size=1)))


def try_directory(directory: Path) -> RoundTrip:
    """Through the page cache, in a namespace of its own, which is removed. Evicts nothing. Makes `directory`.

    Raises `ConfigError` if it cannot be used, and `StorageError` if it does not work.
    """
    from .file.file_backend import FileBackend
    from .file.value_files import remove_if_empty

    namespace = trial_namespace(LAYOUT, block_size=1)
    backend = FileBackend(directory, namespace, capacity_bytes=1 << 62)
    try:
        return _round_trip(backend)
    finally:
        if backend.can_write:
            remove_if_empty(directory / namespace.digest)


def try_mooncake() -> RoundTrip:
    """In memory that servers give to the store: none of this process, which soon ends. In a namespace of its own.

    Raises `ConfigError` if it cannot be used, `StorageFullError` if no server gives memory, and `StorageError` if it
    does not work.
    """
    from .mooncake.mooncake_backend import MooncakeBackend
    from .mooncake.settings import MooncakeSettings

    return _round_trip(MooncakeBackend(MooncakeSettings.read(os.environ), trial_namespace(LAYOUT, block_size=1)))


def _round_trip(backend: StorageBackend) -> RoundTrip:
    """Closes `backend`."""
    keys = [block_key(BlockHash(os.urandom(32)), 0) for _ in range(NUM_VALUES)]
    memory = memoryview(bytearray(os.urandom(NUM_BYTES)))
    values = [memory[begin : begin + VALUE_BYTES] for begin in range(0, NUM_BYTES, VALUE_BYTES)]
    with contextlib.closing(backend):
        try:
            return _checked(backend, keys, values)
        finally:
            backend.remove(keys)


def trial_namespace(layout: CacheLayout, *, block_size: int) -> Namespace:
    """Another one with every call: no server looks there, and nothing is there yet."""
    return Namespace(
        model="doctor",
        weight_epoch=uuid.uuid4().hex,
        layout=layout,
        block_size=block_size,
        tensor_parallel_size=1,
        implementation="doctor",
        hash_version="none",
    )


def _checked(backend: StorageBackend, keys: list[StoreKey], values: list[memoryview]) -> RoundTrip:
    for key, value in zip(keys, values, strict=True):
        seal(value, key, namespace=backend.namespace_digest)
    begin = time.perf_counter()
    backend.put(keys, values)
    put_s = time.perf_counter() - begin
    if (stored := backend.count_stored(keys)) != len(keys):
        raise StorageError(f"of {len(keys)} values that were stored, only the first {stored} are there")
    for value in values:
        value[:] = bytes(len(value))
    begin = time.perf_counter()
    arrived = backend.get(keys, values)
    get_s = time.perf_counter() - begin
    whole = sum(
        is_sealed(value, key, namespace=backend.namespace_digest) for key, value in zip(keys, values, strict=True)
    )
    if (arrived, whole) != (len(keys), len(keys)):
        raise StorageError(f"of {len(keys)} values that were stored, {arrived} came back, and {whole} unchanged")
    backend.remove(keys)
    if backend.count_stored(keys[:1]):
        raise StorageError("a value that was removed is still there")
    return RoundTrip(put_s, get_s, NUM_BYTES)
