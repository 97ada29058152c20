"""This package's `file` store as the store process uses it: `put` in one thread, `get` in several. `checksums` seals
values before `put` and checks them after `get`; `bare` leaves that out.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from file_store import FileStore

from fastdeploy_kvcache_v1 import __version__
from fastdeploy_kvcache_v1.attention.base import CacheLayout, RoleSpec
from fastdeploy_kvcache_v1.contract.messages import BlockHash
from fastdeploy_kvcache_v1.storage.base import StoreKey
from fastdeploy_kvcache_v1.storage.file.description import STORE
from fastdeploy_kvcache_v1.storage.file.file_backend import FileBackend
from fastdeploy_kvcache_v1.storage.namespace import Namespace, block_key
from fastdeploy_kvcache_v1.storage.seal import TRAILER_BYTES, is_sealed, seal

NAMESPACE = Namespace("benchmark", "0", CacheLayout(1, (RoleSpec("key", (1, 64, 1), "float16"),)), 64, 1, "none", "1")
DIGEST = NAMESPACE.digest
UNLIMITED = 1 << 50


class OurFiles(FileStore):
    version = __version__
    pattern = f"{DIGEST}/??/*"
    folder = "tmp"

    def __init__(self, directory: Path, kind: str) -> None:
        self.backends = [FileBackend(directory, NAMESPACE, capacity_bytes=UNLIMITED) for _ in range(STORE.load_threads)]
        self.threads = ThreadPoolExecutor(STORE.load_threads)
        self.is_sealed = kind == "checksums"
        self.extra_bytes = TRAILER_BYTES if self.is_sealed else 0

    def keys(self, hashes: Sequence[bytes]) -> list[StoreKey]:
        return [block_key(BlockHash(each), 0) for each in hashes]

    def put(self, keys: list[StoreKey], held: Sequence[memoryview]) -> None:
        if self.is_sealed:
            for key, buffer in zip(keys, held, strict=True):
                seal(buffer, key, namespace=DIGEST)
        assert self.backends[0].put(keys, held) == len(keys)

    def lookup(self, keys: list[StoreKey]) -> int:
        return self.backends[0].count_stored(keys)

    def get(self, keys: list[StoreKey], held: Sequence[memoryview]) -> int:
        stride = min(len(self.backends), len(keys))
        shares = [(keys[first::stride], held[first::stride]) for first in range(stride)]
        return sum(self.threads.map(self._read, self.backends, *zip(*shares, strict=True)))

    def _read(self, backend: FileBackend, keys: list[StoreKey], held: Sequence[memoryview]) -> int:
        found = backend.get(keys, held)
        if not self.is_sealed:
            return found
        pairs = zip(keys[:found], held, strict=False)
        return sum(is_sealed(buffer, key, namespace=DIGEST) for key, buffer in pairs)

    def close(self) -> None:
        self.threads.shutdown()
        for backend in self.backends:
            backend.close()


CONTENDER = OurFiles
