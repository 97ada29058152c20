"""FileBackend on real files: what is stored, what goes first, and what is left when a process or a disk ends."""

import errno
import itertools
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1.errors import ConfigError, StorageError
from fastdeploy_kvcache_v1.storage.base import StorageFullError
from fastdeploy_kvcache_v1.storage.file import eviction, file_backend, shard_sizes
from fastdeploy_kvcache_v1.storage.file.file_backend import FileBackend
from fastdeploy_kvcache_v1.storage.file.shard_sizes import SHARDS
from fastdeploy_kvcache_v1.storage.file.value_files import list_shard
from tests.storage.file.stores import FILE_BYTES, age, check_sizes, damage, flip_a_byte, found_in, stored, used_by
from tests.storage.values import got, keys, namespace, put, values


@pytest.mark.parametrize(
    # For how many values there is room; those that are stored, each older than the next one, and what is used then; the
    # values that are stored in one go after that, and all that are left.
    ("room", "old", "used", "new", "left"),
    [
        (10, range(10), ("get", 0, 1), [10], [0, 1, 4, 5, 6, 7, 8, 9, 10]),  # a tenth, and room for 10
        (4, [1, 2, 3, 4], ("get", 1, 2, 3, 4), [5], [1, 2, 5]),  # of a prefix the last block goes first
        (4, [1, 2, 3], ("put", 1), [4, 5], [1, 4, 5]),  # what is stored again counts as used
        (10, range(1, 11), ("touch", 1), [11], [1, 4, 5, 6, 7, 8, 9, 10, 11]),
        (6, [], ("put", 1, 2, 3, 4), [5, 6, 7], [1, 2, 5, 6, 7]),  # of a put the first block is the last to go
        (4, range(4), ("get", 3), [], [0, 1, 2, 3]),  # it is full, and nothing goes
    ],
)
def test_what_was_not_used_for_longest_goes_first(store, monkeypatch, room, old, used, new, left):
    monkeypatch.setattr(file_backend, "TOUCHED_S", 0)
    backend = store(capacity=room * FILE_BYTES)
    for number in old:
        put(backend, number)
        age(backend, number, 100 - number)
    how, *numbers = used
    {"get": got, "put": put, "touch": lambda store, *some: store.touch(keys(*some))}[how](backend, *numbers)
    put(backend, *new)
    assert stored(backend, *range(12)) == left
    assert used_by(backend) == len(left) * FILE_BYTES


def test_a_value_is_marked_as_used_now_and_then_and_only_by_who_can_write(store):
    writer, reader = store(), store()
    reader.close()
    reader._used = None
    put(writer, 1)

    def marked(backend, seconds):
        age(writer, 1, seconds)
        before = os.stat(writer._path(keys(1)[0])).st_mtime_ns
        assert got(backend, 1) == 1
        return os.stat(writer._path(keys(1)[0])).st_mtime_ns != before

    assert marked(writer, file_backend.TOUCHED_S + 1)
    assert not marked(writer, file_backend.TOUCHED_S - 5)
    assert not marked(reader, file_backend.TOUCHED_S + 1)


def test_capacity_holds_for_all_namespaces_and_processes_together(store):
    """And the old model's blocks leave first, because nobody uses them."""
    old, new = store(capacity=10 * FILE_BYTES), store(capacity=10 * FILE_BYTES, model="n")
    put(old, *range(8))
    for number in range(8):
        age(old, number, 100)
    most = 0
    for number in range(30):
        put((old, new)[number % 2], 100 + number)
        most = max(most, found_in(new)[1])
    assert most <= 10 * FILE_BYTES
    assert old.count_stored(keys(0)) == 0


def test_more_than_the_capacity_at_once_is_refused_and_costs_nothing(store):
    backend = store(capacity=2 * FILE_BYTES)
    put(backend, 1)
    with pytest.raises(StorageError, match="capacity"):
        put(backend, 2, 3, 4)
    assert got(backend, 1) == 1
    assert used_by(backend) == FILE_BYTES


def test_a_put_of_exactly_the_capacity_is_stored(store):
    backend = store(capacity=2 * FILE_BYTES)
    put(backend, 1)
    assert put(backend, 2, 3) == 2
    assert stored(backend, 1, 2, 3) == [2, 3]


def test_who_cannot_write_finds_a_value_that_another_process_has_repaired(store):
    writer, reader = store(), store()
    reader.close()
    reader._used = None
    put(writer, 1, 2)
    os.truncate(writer._path(keys(1)[0]), 1)
    assert got(reader, 1, 2) == 0
    assert reader.count_stored(keys(1, 2)) == 0
    assert got(writer, 1) == 0
    put(writer, 1)
    assert reader.count_stored(keys(1, 2)) == 2
    assert got(reader, 1, 2) == 2


def bytes_in(directory):
    return sum(path.stat().st_size for path in directory.rglob("*.*") if path.is_file())


@pytest.fixture
def small_disk(store, monkeypatch):
    """A backend's disk is full once so many bytes are on it; `refused` has the writes that it refused."""

    def mount(backend, room, code, before=lambda: None):
        disk, write = SimpleNamespace(room=room, refused=[]), os.write

        def write_on_it(file, data):
            before()
            if bytes_in(backend.directory) + len(data) > disk.room:
                disk.refused.append(len(data))
                raise OSError(code, os.strerror(code))
            return write(file, data)

        monkeypatch.setattr(os, "write", write_on_it)
        return disk

    return mount


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_disk_full_below_the_capacity_keeps_its_newest_values(store, small_disk, caplog, code):
    backend = store()
    disk = small_disk(backend, bytes_in(backend.directory) + 10 * FILE_BYTES, code)
    for number in range(0, 40, 2):
        assert put(backend, number, number + 1) == 2
        assert used_by(backend) == found_in(backend)[1]
    assert disk.refused
    assert got(backend, 38, 39) == 2
    assert backend.count_stored(keys(0)) == 0
    assert found_in(backend)[0] >= 8, "it makes room for some values, not for all"
    (warning,) = caplog.messages
    assert "is full: evicting the oldest values" in warning
    assert list((backend.directory / "tmp").iterdir()) == []
    disk.room, before = 1 << 30, found_in(backend)[0]
    for number in range(40, 80):
        assert put(backend, number) == 1
    assert found_in(backend)[0] == before + 40, "a disk with room again is used up to the capacity"


def test_a_put_that_a_full_disk_cannot_hold_evicts_nothing(store, small_disk):
    backend = store()
    put(backend, *range(5))
    disk = small_disk(backend, bytes_in(backend.directory) + 5 * FILE_BYTES, errno.ENOSPC)
    with pytest.raises(StorageError, match="No space left"):
        put(backend, *range(5, 15))
    assert len(disk.refused) == 2
    assert stored(backend, *range(15)) == list(range(10))
    check_sizes(backend)


def test_processes_that_fill_a_disk_at_once_make_room_once(store, small_disk, caplog):
    """Ranks of a server store the same blocks at the same time, and are refused at the same time."""
    ranks, met = [store() for _ in range(4)], []
    for number in range(80):
        put(ranks[0], number)

    def meet():  # all are refused before the first makes room
        if len(met) < len(ranks):
            met.append(True)
            if len(met) < len(ranks):
                put(ranks[len(met)], 80 + len(met))
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    small_disk(ranks[0], bytes_in(ranks[0].directory), errno.EDQUOT, meet)
    assert put(ranks[0], 80) == 1
    assert len(caplog.messages) == 1, "the first one makes room, for all"
    assert found_in(ranks[0])[0] == 75, "a tenth is deleted once, and four are new"
    assert ranks[0].count_stored(keys(80, 81, 82, 83)) == 4


def test_a_part_of_the_disk_stays_free(store, monkeypatch, caplog):
    """As large as the file system says, and never asked to be full."""
    backend, statvfs, free = store(), os.statvfs, []

    def small(_):
        free.append(20 * FILE_BYTES - found_in(backend)[1])
        return SimpleNamespace(f_blocks=40 * FILE_BYTES // 512, f_bavail=free[-1] // 512, f_frsize=512)

    monkeypatch.setattr(os, "statvfs", small)
    monkeypatch.setattr(eviction, "FREE_SHARE", 0.1)
    for number in range(0, 60, 2):
        assert put(backend, number, number + 1) == 2
        assert used_by(backend) == found_in(backend)[1]
    small(backend.directory)
    assert min(free) >= 4 * FILE_BYTES
    assert got(backend, 58, 59) == 2
    assert found_in(backend)[0] >= 12
    assert len(caplog.messages) == 1
    monkeypatch.setattr(os, "statvfs", statvfs)
    stored = found_in(backend)[0]
    for number in range(60, 80):
        assert put(backend, number) == 1
    assert found_in(backend)[0] == stored + 20, "a disk with room again is used up to the capacity"


def unreadable(monkeypatch, backend, number, code):
    """The disk fails where the value lies, whatever file has it."""
    inode, preadv = os.stat(backend._path(keys(number)[0])).st_ino, os.preadv

    def read(file, *given):
        if os.fstat(file).st_ino == inode:
            raise OSError(code, os.strerror(code))
        return preadv(file, *given)

    monkeypatch.setattr(os, "preadv", read)


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EOPNOTSUPP], ids=["not in memory", "cannot tell"])
@pytest.mark.parametrize("cold", [0, 2, 3])
def test_before_the_disk_is_waited_for_all_later_reads_are_begun(store, monkeypatch, cold, code):
    backend = store()
    put(backend, 0, 1, 2, 3)
    preadv, numbers = os.preadv, {os.stat(backend._path(keys(each)[0])).st_ino: each for each in range(4)}
    calls = []

    def number_of(file):
        return numbers[os.fstat(file).st_ino]

    def read(file, buffers, offset, flags=0):
        if not flags:
            calls.append(("waits", number_of(file)))
        elif number_of(file) >= cold:
            raise OSError(code, os.strerror(code))
        return preadv(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", read)
    monkeypatch.setattr(os, "posix_fadvise", lambda file, *_: calls.append(("begins", number_of(file))))
    assert got(backend, 0, 1, 2, 3) == 4
    assert calls == [("begins", each) for each in range(cold + 1, 4)] + [("waits", each) for each in range(cold, 4)]


def test_many_values_that_cannot_be_read_are_one_line_of_the_log_a_minute(store, monkeypatch, caplog):
    backend = store()
    put(backend, *range(100))
    now = [1000.0]
    monkeypatch.setattr("fastdeploy_kvcache_v1.storage.file.file_backend.time.monotonic", lambda: now[0])
    for number in range(100):
        os.unlink(backend._path(keys(number)[0]))
        os.mkdir(backend._path(keys(number)[0]))
    for number in range(50):
        assert got(backend, number) == 0
    assert len(caplog.messages) == 1
    now[0] += 60.0
    for number in range(50, 100):
        assert got(backend, number) == 0
    assert len(caplog.messages) == 2
    assert caplog.messages[1].endswith(", and 49 more values")


@pytest.mark.parametrize("code", [errno.EIO, errno.ELOOP, errno.EACCES, errno.EISDIR, errno.ENXIO, errno.EBADMSG])
def test_a_value_that_cannot_be_read_is_a_miss_and_is_stored_again(store, monkeypatch, caplog, code):
    backend = store()
    put(backend, 1, 2, 3)
    kept = os.open(backend._path(keys(2)[0]), os.O_RDONLY)  # so that no other file gets its inode
    unreadable(monkeypatch, backend, 2, code)
    for _ in range(4):
        assert got(backend, 1, 2, 3) == 1
        assert backend.count_stored(keys(1, 2, 3)) == 1
    (warning,) = caplog.messages
    assert warning.endswith(f"{keys(2)[0]} is ignored ({os.strerror(code)}): its block is a miss")
    assert used_by(backend) == 2 * FILE_BYTES
    assert put(backend, 1, 2, 3) == 1
    assert got(backend, 1, 2, 3) == 3
    os.close(kept)


@pytest.mark.parametrize("make", ["link", "link to nothing", "directory", "full directory", "pipe"])
@pytest.mark.parametrize("first", ["get", "count", "put"])
def test_what_is_no_file_is_a_miss_and_is_stored_again(store, tmp_path, make, first):
    backend = store()
    put(backend, 1, 2, 3)
    path, other = backend._path(keys(2)[0]), tmp_path / "other"
    os.unlink(path)
    if make.startswith("link"):
        other.write_bytes(values(keys(2))[0])
        os.symlink(other if make == "link" else "nothing", path)
    elif make == "pipe":
        os.mkfifo(path)
    else:
        os.mkdir(path)
        if make == "full directory":
            os.mkdir(f"{path}/deeper")
    if first == "get":
        assert got(backend, 1, 2, 3) == 1
    elif first == "count":
        assert backend.count_stored(keys(1, 2, 3)) == 1
    assert put(backend, 1, 2, 3) == 1
    assert got(backend, 1, 2, 3) == 3
    assert not make.startswith("link") or other.read_bytes() == values(keys(2))[0]


@pytest.mark.parametrize("what", ["file", "link to nothing", "link"])
@pytest.mark.parametrize("first", [got, put, lambda store, number: stored(store, number)], ids=["get", "put", "count"])
def test_what_lies_in_the_place_of_a_shard_costs_its_values(store, tmp_path, what, first):
    backend = store()
    put(backend, 1, 2, 3)
    shard = Path(backend._path(keys(2)[0])).parent
    shutil.rmtree(shard)
    (tmp_path / "letter").write_text("Dear")
    if what == "file":
        shard.write_text("in the way")
    else:
        shard.symlink_to("nothing" if what == "link to nothing" else tmp_path / "letter")
    first(backend, 2)
    assert stored(backend, 1, 3) == [1, 3]
    put(backend, 2)
    assert got(backend, 1, 2, 3) == 3
    assert (tmp_path / "letter").read_text() == "Dear"
    put(backend, *range(4, 30))
    list_all(backend)
    check_sizes(backend)


def list_all(backend):
    for shard in SHARDS:
        list_shard(backend.directory, shard, backend._used)


DAY_S = 24 * 60 * 60


def test_servers_of_a_directory_write_what_a_day_allows(store, monkeypatch):
    now, budget = [time.time_ns()], 24 * 20 * FILE_BYTES
    monkeypatch.setattr(time, "time_ns", lambda: now[0])
    servers, numbers = [store(capacity=50 * FILE_BYTES) for _ in range(2)], itertools.count(0, 4)
    written = 0
    for server in servers:
        server.write_bytes_per_day = budget
    for minute in range(0, 24 * 60, 5):
        now[0] += 5 * 60 * 10**9
        for server in servers:
            first = next(numbers)
            before = found_in(server)
            try:
                written += put(server, *range(first, first + 4)) * FILE_BYTES
                last = first
            except StorageFullError:
                assert found_in(server) == before, "nothing is evicted for what is not written"
        assert written <= budget * (minute + 5) / (24 * 60) + budget / 24 + 4 * FILE_BYTES
    assert written > 0.95 * budget
    assert put(servers[0], *range(last, last + 4)) == 0, "what is stored costs nothing"


def test_a_budget_goes_on_after_a_clock_that_was_ahead(store, monkeypatch):
    now = [time.time_ns() + 365 * DAY_S * 10**9]
    monkeypatch.setattr(time, "time_ns", lambda: now[0])
    backend = store()
    backend.write_bytes_per_day = 24 * FILE_BYTES
    put(backend, 1, 2)
    now[0] -= 365 * DAY_S * 10**9
    with pytest.raises(StorageFullError):
        put(backend, 3)
    now[0] += 2 * 60 * 60 * 10**9
    assert put(backend, 3) == 1


def test_values_from_the_future_go_before_all_that_was_used_since(store, monkeypatch):
    """A clock that was ahead is set right."""
    backend = store(capacity=10 * FILE_BYTES)
    put(backend, *range(8))
    for number in range(8):
        age(backend, number, -DAY_S)
    put(backend, 8, 9)
    assert got(backend, 1, 2) == 2
    put(backend, 10)
    assert stored(backend, 1, 2, 8, 9, 10) == [1, 2, 8, 9, 10]
    put(backend, 11, 12, 13, 14)
    assert stored(backend, *range(15)) == [1, 2, 8, 9, 10, 11, 12, 13, 14]


def test_a_clock_that_was_a_moment_ahead_costs_nothing(store):
    backend = store(capacity=4 * FILE_BYTES)
    put(backend, 1, 2, 3, 4)
    for number, seconds in ((1, 40), (2, 30), (3, -5), (4, 20)):
        age(backend, number, seconds)
    put(backend, 5)
    assert stored(backend, 1, 2, 3, 4, 5) == [3, 4, 5]


def test_values_of_another_size_are_stored_again_without_a_load(store):
    """The machine crashed before their bytes were on the disk."""
    backend = store()
    put(backend, *range(6))
    for number in range(5):
        os.truncate(backend._path(keys(number)[0]), 0)
    assert put(backend, *range(6)) == 5
    assert got(backend, *range(6)) == 6


def test_a_damaged_value_makes_doubt_of_all_that_are_as_old(store, monkeypatch):
    """They may lie on the same blocks of a disk, or were not on it when the machine crashed."""
    loading, storing = store(), store()
    put(storing, *range(6))
    for number in (1, 2, 4):
        damage(storing, number, flip_a_byte)
    read = []
    whole = file_backend.is_whole
    monkeypatch.setattr(file_backend, "is_whole", lambda path, namespace: read.append(path) or whole(path, namespace))
    assert put(storing, *range(6)) == len(read) == 0
    for number in range(6):
        age(storing, number, 120)
    with monkeypatch.context() as clock:  # files are used by the kernel's clock, which is a few ms behind
        a_minute_ago = time.time_ns() - 60 * 10**9
        clock.setattr(time, "time_ns", lambda: a_minute_ago)
        loading.remove_damaged(keys(1))
    assert put(storing, *range(6)) == 3
    assert len(read) == 5
    assert got(loading, *range(6)) == 6
    assert put(storing, *range(6)) == 0
    assert len(read) == 5, "each value is read once"


def test_a_capacity_of_nothing_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="capacity above 0"):
        FileBackend(tmp_path / "kv", namespace(), capacity_bytes=0)


def test_a_lock_that_nobody_gives_back_is_an_error_and_no_hang(store, monkeypatch):
    backend, other = store(), store()
    monkeypatch.setattr(shard_sizes, "LOCK_TIMEOUT_S", 0.05)
    with other._used.exclusive(), pytest.raises(StorageError, match="has held its lock"):
        put(backend, 1)
    assert put(backend, 1) == 1
