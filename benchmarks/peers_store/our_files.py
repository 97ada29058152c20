"""This package's `file` store: `checksums` seals values before `put` and checks them after `get`, as the store process
does; `bare` leaves that out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from file_store import FileStore

from fastdeploy_kvcache_v1 import __version__
from fastdeploy_kvcache_v1.attention.base import CacheLayout, RoleSpec
from fastdeploy_kvcache_v1.contract.messages import BlockHash
from fastdeploy_kvcache_v1.storage.base import StoreKey
from fastdeploy_kvcache_v1.storage.file.file_backend import FileBackend
from fastdeploy_kvcache_v1.storage.namespace import Namespace, block_key
from fastdeploy_kvcache_v1.storage.seal import TRAILER_BYTES, is_sealed, seal

NAMESPACE = Namespace("benchmark", "0", CacheLayout(1, (RoleSpec("key", (1, 64, 1), "float16"),)), 64, 1, "none", "1")
UNLIMITED = 1 << 50


class OurFiles(FileStore):
    version = __version__
    pattern = f"{NAMESPACE.digest}/??/*"
    folder = "tmp"

    def __init__(self, directory: Path, kind: str) -> None:
        self.backend = FileBackend(directory, NAMESPACE, capacity_bytes=UNLIMITED)
        self.is_sealed = kind == "checksums"
        self.extra_bytes = TRAILER_BYTES if self.is_sealed else 0

    def keys(self, hashes: Sequence[bytes]) -> list[StoreKey]:
        return [block_key(BlockHash(each), 0) for each in hashes]

    def put(self, keys: list[StoreKey], held: Sequence[memoryview]) -> None:
        if self.is_sealed:
            for key, buffer in zip(keys, held, strict=True):
                seal(buffer, key, namespace=self.backend.namespace_digest)
        assert self.backend.put(keys, held) == len(keys)

    def lookup(self, keys: list[StoreKey]) -> int:
        return self.backend.count_stored(keys)

    def get(self, keys: list[StoreKey], held: Sequence[memoryview]) -> int:
        found = self.backend.get(keys, held)
        if not self.is_sealed:
            return found
        pairs = zip(keys[:found], held, strict=False)
        return sum(is_sealed(buffer, key, namespace=self.backend.namespace_digest) for key, buffer in pairs)

    def close(self) -> None:
        self.backend.close()


CONTENDER = OurFiles
