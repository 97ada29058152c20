"""Shards of the file store: their bytes are those of the files, and an eviction stops nobody."""

import contextlib
import fcntl
import itertools
import os
import random
import struct

import pytest

from fastdeploy_kvcache_v1.storage.file import eviction, shard_sizes, value_files
from fastdeploy_kvcache_v1.storage.file.eviction import Eviction
from fastdeploy_kvcache_v1.storage.file.shard_sizes import SHARDS
from fastdeploy_kvcache_v1.storage.file.value_files import list_shard, stored_files
from tests.forked import ended_well, start
from tests.storage.file.stores import FILE_BYTES, age, check_sizes, found_in, stored, used_by
from tests.storage.values import keys, put

NUMBERS = 2 * len(SHARDS)


def table(number):
    return struct.pack("<qqqq", 0, 0, 0, 0) + struct.pack("<q", number) * NUMBERS


@pytest.mark.parametrize("is_running", [True, False], ids=["under a server", "before a start"])
@pytest.mark.parametrize(
    "content",
    [None, b"", b"\xff" * 7, struct.pack("<q", 8 * FILE_BYTES), *map(table, (0, -1, -(1 << 63), (1 << 63) - 1))],
    ids=["lost", "empty", "cut", "of an older version", "zeros", "ones", "negative", "huge"],
)
def test_numbers_that_are_lost_or_damaged_are_counted_anew(store, directory, content, is_running):
    backend = store(capacity=10 * FILE_BYTES)
    put(backend, *range(8))
    if content is None:
        (directory / "used").unlink()
    else:
        (directory / "used").write_bytes(content)
    if not is_running:
        backend = store(capacity=10 * FILE_BYTES)
    put(backend, 8)
    assert used_by(backend) == found_in(backend)[1] == 9 * FILE_BYTES
    for number in range(9, 30):
        put(backend, number)
        assert found_in(backend)[1] <= 10 * FILE_BYTES
    check_sizes(backend)


def test_shards_that_are_not_counted_yet_are_as_large_as_the_others(store, directory, monkeypatch):
    monkeypatch.setattr(eviction, "COUNTED", 100)
    backend = store(capacity=1000 * FILE_BYTES)
    put(backend, *range(400))
    (directory / "used").write_bytes(b"")
    put(backend, 400)
    assert 64 < len(backend._used.unknown()) < 256, "a put counts some"
    assert 300 * FILE_BYTES < used_by(backend) < 500 * FILE_BYTES
    for number in range(401, 406):
        put(backend, number)
    assert used_by(backend) == 406 * FILE_BYTES
    check_sizes(backend)


def test_a_listing_does_not_count_a_shard_that_has_changed_meanwhile(store, monkeypatch):
    backend, other = store(), store()
    put(backend, 1, 2)
    (key,) = keys(1)
    listing = value_files._values_in

    def store_meanwhile(shard):
        found = list(listing(shard))
        other.remove(keys(1))
        return found

    monkeypatch.setattr(value_files, "_values_in", store_meanwhile)
    assert len(list_shard(backend.directory, key[:2], backend._used)) == 1
    monkeypatch.undo()
    assert used_by(backend) == FILE_BYTES
    check_sizes(backend)


def test_values_deleted_by_hand_are_room_after_an_eviction(store):
    backend = store(capacity=10 * FILE_BYTES)
    put(backend, *range(10))
    for number in range(10):
        os.unlink(backend._path(keys(number)[0]))
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(backend._path(keys(number)[0])))
    put(backend, *range(10, 15))
    put(backend, *range(15, 20))
    assert found_in(backend)[0] == 10, "nothing was evicted"
    check_sizes(backend)


@pytest.mark.process
def test_processes_that_store_and_delete_at_once_count_what_is_there(store):
    backend = store(capacity=60 * FILE_BYTES)

    def use(seed):
        mine, chosen = store(capacity=60 * FILE_BYTES), random.Random(seed)
        for _ in range(60):
            some = [chosen.randrange(100) for _ in range(4)]
            if chosen.random() < 0.2:
                mine.remove(keys(*some))
            else:
                put(mine, *dict.fromkeys(some))
            with mine._used.exclusive():
                assert found_in(mine)[1] <= 60 * FILE_BYTES
                check_sizes(mine)

    assert ended_well(*(start(use, seed) for seed in range(4)))
    check_sizes(backend)


def filled(backend, count):
    """The first number is the oldest."""
    for first in range(0, count, 32):
        put(backend, *range(first, min(count, first + 32)))
    for number in range(count):
        age(backend, number, 1000 + count - number)


@pytest.fixture
def small_steps(monkeypatch):
    """Directories of some hundred values are large."""
    monkeypatch.setattr(eviction, "LISTED", 40)
    monkeypatch.setattr(eviction.random, "shuffle", random.Random(1).shuffle)


def test_an_eviction_of_a_large_directory_stops_once_there_is_room(store, small_steps):
    backend = store(capacity=2000 * FILE_BYTES)
    filled(backend, 1200)
    evicting = Eviction(backend.directory, 1200 * FILE_BYTES)
    evicting.make_room(backend._used, FILE_BYTES)
    left = len(list(stored_files(backend.directory)))
    assert 1180 < left < 1200
    evicting.make_room(backend._used, 100 * FILE_BYTES)
    gone = [number for number in range(1200) if not stored(backend, number)]
    assert 100 <= len(gone) < 140
    assert max(gone) < 400, "a cut-off of four shards takes a tenth, and finds the old values"
    check_sizes(backend)


def test_an_eviction_finds_that_values_were_deleted_by_hand(store, small_steps):
    backend = store(capacity=2000 * FILE_BYTES)
    filled(backend, 1200)
    for number in range(0, 1200, 2):
        os.unlink(backend._path(keys(number)[0]))
    for _ in range(20):
        Eviction(backend.directory, 1200 * FILE_BYTES).make_room(backend._used, 5 * FILE_BYTES)
    assert found_in(backend)[0] == 600


def test_nobody_waits_for_a_listing_or_many_deletions(store, monkeypatch):
    """What happens under one lock does not grow with the number of values."""
    backend = store(capacity=400 * FILE_BYTES)
    monkeypatch.setattr(value_files, "SLICE", 2)
    filled(backend, 400)
    held, deleted = [], [0]
    flock, unlink, scandir = fcntl.flock, os.unlink, os.scandir

    def watched_lock(file, how):
        flock(file, how)
        held[:] = [] if how & fcntl.LOCK_UN else [file]
        deleted.append(0)

    def watched_unlink(path):
        assert held
        deleted[-1] += 1
        unlink(path)

    def watched_listing(path):
        assert not held
        return scandir(path)

    monkeypatch.setattr(fcntl, "flock", watched_lock)
    monkeypatch.setattr(os, "unlink", watched_unlink)
    monkeypatch.setattr(os, "scandir", watched_listing)
    assert put(backend, 400) == 1
    assert (sum(deleted), max(deleted)) == (41, 2)


@pytest.mark.parametrize("words", [["prune", "--to-gib", "0"], ["clear"], None], ids=["prune", "clear", "eviction"])
def test_another_server_stores_in_the_middle_of_deletions(store, storage, monkeypatch, words):
    backend, other = store(), store(capacity=1000 * FILE_BYTES)
    monkeypatch.setattr(value_files, "SLICE", 2)
    monkeypatch.setattr(shard_sizes, "LOCK_TIMEOUT_S", 0.0)
    filled(backend, 100)
    numbers, listing = itertools.count(1000), eviction.list_shard

    def store_meanwhile(*_):
        assert put(other, next(numbers)) == 1

    def list_and_store(*given):
        store_meanwhile()
        return listing(*given)

    monkeypatch.setattr(value_files.time, "sleep", store_meanwhile)
    monkeypatch.setattr(eviction, "list_shard", list_and_store)
    if words:
        storage(*words)
    else:
        Eviction(backend.directory, 100 * FILE_BYTES).make_room(backend._used, 90 * FILE_BYTES)
    assert next(numbers) > 1040
    check_sizes(backend)
