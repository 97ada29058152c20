"""Shared by the tests of the file store: what a test ages, damages, and finds again."""

import os
import time

from fastdeploy_kvcache_v1.storage.file.shard_sizes import SHARDS
from fastdeploy_kvcache_v1.storage.file.value_files import stored_files
from tests.storage.values import keys

FILE_BYTES = 8192
"""What a value takes on the disk."""


def used_by(backend):
    """Bytes, as the processes that share the directory count them."""
    return backend._used.read()


def found_in(backend):
    """Values and bytes of all namespaces that are on the disk."""
    files = list(stored_files(backend.directory))
    return len(files), sum(file.num_bytes for file in files)


def age(backend, number, seconds):
    then = time.time() - seconds
    os.utime(backend._path(keys(number)[0]), (then, then))


def stored(backend, *numbers):
    return [number for number in numbers if backend.count_stored(keys(number))]


def everything(directory):
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def damage(backend, number, how):
    with open(backend._path(keys(number)[0]), "r+b") as file:
        how(file)


def flip_a_byte(file):
    byte = file.read(1)
    file.seek(0)
    file.write(bytes([byte[0] ^ 1]))


def check_sizes(backend):
    """The conservation law: the bytes of each shard are those of its files."""
    counted = dict.fromkeys(SHARDS, 0)
    for file in stored_files(backend.directory):
        counted[file.shard] += file.num_bytes
    assert backend._used.unknown() == []
    assert {shard: backend._used._shard(shard)[0] for shard in SHARDS} == counted
