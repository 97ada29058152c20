"""FileBackend on real files: what is stored, what goes first, and what is left when a process or a disk ends."""

import contextlib
import errno
import os
import random
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from fastdeploy_kvcache_v1.errors import ConfigError, StorageError
from fastdeploy_kvcache_v1.storage.file import file_backend, shared_counter
from fastdeploy_kvcache_v1.storage.file.file_backend import FileBackend
from fastdeploy_kvcache_v1.storage.file.value_files import stored_files
from tests.storage.values import VALUE_BYTES, empty, holds, keys, namespace, values

FILE_BYTES = 8192
"""What a value takes on the disk."""


@pytest.fixture
def store(tmp_path):
    opened = []

    def open_store(capacity=100 * FILE_BYTES, directory=tmp_path / "kv", **changes):
        opened.append(FileBackend(directory, namespace(**changes), capacity_bytes=capacity))
        return opened[-1]

    yield open_store
    for backend in opened:
        backend.close()
        backend.close()


def put(backend, *numbers):
    return backend.put(keys(*numbers), values(keys(*numbers)))


def got(backend, *numbers):
    """How many values arrived; checks each of them."""
    buffers = empty(len(numbers))
    count = backend.get(keys(*numbers), buffers)
    assert all(holds(buffer, key) for buffer, key in zip(buffers[:count], keys(*numbers), strict=False))
    return count


def used_by(backend):
    return backend._used.read()


def test_values_come_back_as_far_as_they_are_stored(store):
    backend = store()
    assert put(backend, 1, 2, 3, 5) == 4
    assert backend.count_stored(keys(1, 2, 3, 4, 5)) == 3
    assert got(backend, 1, 2, 3, 4, 5) == 3
    assert got(backend, 4) == 0
    assert backend.count_stored([]) == got(backend) == put(backend) == 0


def test_a_value_is_written_once(store):
    backend = store()
    assert put(backend, 1, 2) == 2
    assert put(backend, 2, 3) == 1
    assert backend.usage().num_values == 3
    assert backend.usage().num_bytes == used_by(backend) == 3 * FILE_BYTES


def test_another_process_or_a_restart_finds_what_was_stored(store):
    put(store(), 1, 2)
    assert got(store(), 1, 2) == 2


def test_namespaces_never_meet(store):
    put(store(), 1)
    assert got(store(weight_epoch="1"), 1) == 0
    assert store(weight_epoch="1").usage().num_values == 1, "usage is of all namespaces"


@pytest.mark.parametrize("size", [0, VALUE_BYTES - 1, VALUE_BYTES + 1])
def test_a_value_of_another_size_is_a_miss_and_is_stored_again(store, size):
    backend = store()
    put(backend, 1, 2)
    os.truncate(backend._path(keys(2)[0]), size)
    assert got(backend, 1, 2) == 1
    assert backend.count_stored(keys(1, 2)) == 1
    assert put(backend, 1, 2) == 1
    assert got(backend, 1, 2) == 2


def test_what_was_not_used_for_longest_goes_first(store, monkeypatch):
    monkeypatch.setattr(file_backend, "TOUCHED_S", 0)
    backend = store(capacity=10 * FILE_BYTES)
    for number in range(10):
        put(backend, number)
        age(backend, number, 100 - number)
    assert got(backend, 0, 1) == 2
    put(backend, 10)
    kept = [number for number in range(11) if backend.count_stored(keys(number))]
    assert kept == [0, 1, 4, 5, 6, 7, 8, 9, 10], "2 and 3: a tenth is freed, and room for the new one"
    assert used_by(backend) == len(kept) * FILE_BYTES


def test_of_a_prefix_the_last_block_goes_first(store, monkeypatch):
    monkeypatch.setattr(file_backend, "TOUCHED_S", 0)
    backend = store(capacity=4 * FILE_BYTES)
    put(backend, 1, 2, 3, 4)
    for number in (1, 2, 3, 4):
        age(backend, number, 100)
    assert got(backend, 1, 2, 3, 4) == 4
    put(backend, 5)
    assert backend.count_stored(keys(1, 2, 3, 4)) == 2


def test_values_that_are_stored_again_count_as_used(store):
    backend = store(capacity=4 * FILE_BYTES)
    put(backend, 1, 2, 3)
    for number in (1, 2, 3):
        age(backend, number, 100)
    put(backend, 1)
    put(backend, 4, 5)
    assert [backend.count_stored(keys(number)) for number in (1, 2, 3, 4, 5)] == [1, 0, 0, 1, 1]


def age(backend, number, seconds):
    then = time.time() - seconds
    os.utime(backend._path(keys(number)[0]), (then, then))


def test_capacity_holds_for_all_namespaces_and_processes_together(store):
    """And the old model's blocks leave first, because nobody uses them."""
    old, new = store(capacity=10 * FILE_BYTES), store(capacity=10 * FILE_BYTES, model="n")
    put(old, *range(8))
    for number in range(8):
        age(old, number, 100)
    most = 0
    for number in range(30):
        put((old, new)[number % 2], 100 + number)
        most = max(most, new.usage().num_bytes)
    assert most <= 10 * FILE_BYTES
    assert old.count_stored(keys(0)) == 0


def test_more_than_the_capacity_at_once_is_refused_and_costs_nothing(store):
    backend = store(capacity=2 * FILE_BYTES)
    put(backend, 1)
    with pytest.raises(StorageError, match="capacity"):
        put(backend, 2, 3, 4)
    assert got(backend, 1) == 1
    assert used_by(backend) == FILE_BYTES


def test_a_full_disk_stores_what_it_can_and_leaves_nothing_half(store, monkeypatch):
    backend = store()
    write, left = os.write, [FILE_BYTES + 1000]

    def write_until_full(file, data):
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write(file, data[: left[0]])
        left[0] -= written
        return written

    monkeypatch.setattr(os, "write", write_until_full)
    with pytest.raises(StorageError, match="No space left on device"):
        put(backend, 1, 2, 3)
    monkeypatch.undo()
    assert got(backend, 1, 2) == 1
    assert list((backend.directory / "tmp").iterdir()) == []
    assert used_by(backend) == FILE_BYTES
    assert put(backend, 1, 2, 3) == 2


def test_an_error_of_the_disk_is_a_storage_error(store, monkeypatch):
    backend = store()
    put(backend, 1)

    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(StorageError, match="Input/output error"):
        got(backend, 1)
    monkeypatch.setattr(os, "stat", broken)
    with pytest.raises(StorageError, match="Input/output error"):
        backend.count_stored(keys(1))


def test_a_directory_that_cannot_be_written_is_read(store, tmp_path):
    """In a child without root's rights, to which nothing is forbidden."""
    put(store(), 1, 2)
    allow_everybody_to_read(tmp_path)

    def use():
        backend = FileBackend(tmp_path / "kv", namespace(), capacity_bytes=10 * FILE_BYTES)
        assert not backend.can_write
        assert got(backend, 1, 2) == 2
        with pytest.raises(StorageError, match="cannot be written to"):
            put(backend, 3)
        backend.close()
        with pytest.raises(ConfigError, match="cannot be made"):
            FileBackend(tmp_path / "other", namespace(), capacity_bytes=1)

    assert in_a_child(use, user=65534) == 0


def allow_everybody_to_read(directory):
    for parent in directory.parents[:3]:
        parent.chmod(0o755)
    for path in [directory, *directory.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)


def in_a_child(use, user=None):
    """Exit status of a forked child that runs `use`."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        if user is not None and os.geteuid() == 0:
            os.setuid(user)
        use()
        status = 0
    finally:
        os._exit(status)


def test_a_killed_writer_leaves_nothing_half(store):
    rng = random.Random(5)
    backend = store(capacity=40 * FILE_BYTES)
    survivors = 0
    for round_ in range(100):
        told, tell = os.pipe()
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                writer = FileBackend(backend.directory, namespace(), capacity_bytes=40 * FILE_BYTES)
                for number in range(100):
                    put(writer, *(1000 * round_ + 4 * number + i for i in range(4)))
                    os.write(tell, b".")
                signal.pause()
            os._exit(1)
        os.close(tell)
        begun = os.read(told, 1)  # however slow the machine is, it is killed while it writes
        time.sleep(rng.uniform(0.0, 0.02))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(told)
        assert begun
        files = list(stored_files(backend.directory))
        survivors += len(files)
        assert {file.num_bytes for file in files} <= {FILE_BYTES}
        assert sum(file.num_bytes for file in files) <= 40 * FILE_BYTES
    assert survivors > 100
    for path in (os.path.basename(file.path) for file in stored_files(backend.directory)):
        buffers = empty(1)
        assert backend.get([path], buffers) == 1
        assert holds(buffers[0], path)
    put(backend, *range(7))
    assert got(backend, *range(7)) == 7, "room that killed writers had reserved is found again"


def test_what_a_killed_writer_left_is_removed_later(store, tmp_path):
    store()
    left = tmp_path / "kv" / "tmp" / "1.2.3"
    left.write_bytes(b"half")
    store()
    assert left.exists(), "its writer may live"
    os.utime(left, (1, 1))
    store()
    assert not left.exists()


def test_two_processes_write_and_evict_at_once(store):
    backend = store(capacity=20 * FILE_BYTES)

    def use(seed):
        rng = random.Random(seed)
        mine = FileBackend(backend.directory, namespace(), capacity_bytes=20 * FILE_BYTES)
        for _ in range(200):
            numbers = rng.sample(range(60), 4)
            put(mine, *numbers)
            got(mine, *rng.sample(range(60), 4))

    children = []
    for seed in range(2):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                use(seed)
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    assert backend.usage().num_bytes <= 20 * FILE_BYTES


def test_a_directory_of_another_version_is_refused(tmp_path):
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / "format").write_text("fastdeploy-kvcache-v1 storage 0\n")
    with pytest.raises(ConfigError, match="another version"):
        FileBackend(tmp_path / "kv", namespace(), capacity_bytes=1)


def test_a_directory_with_other_files_is_refused(tmp_path):
    (tmp_path / "letter.txt").write_text("Dear")
    with pytest.raises(ConfigError, match="holds other files"):
        FileBackend(tmp_path, namespace(), capacity_bytes=1)
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


def test_a_capacity_of_nothing_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="capacity above 0"):
        FileBackend(tmp_path / "kv", namespace(), capacity_bytes=0)


@pytest.mark.parametrize("deleted", ["namespace", "tmp", "format", "used", "everything", "the directory"])
def test_what_was_deleted_under_a_running_server_is_made_again(store, deleted):
    backend, other = store(), store()
    put(backend, 1)
    remove_tree(backend.directory, deleted)
    assert put(backend, 2, 3) == 2
    assert got(backend, 2, 3) == 2
    assert put(other, 4) == 1
    present = {path.name for path in backend.directory.iterdir()}
    assert present == {"format", "used", "tmp", namespace().digest}
    assert (backend.directory / namespace().digest / "manifest.json").read_text() == namespace().manifest()
    assert store().can_write, "the next server takes it for a storage directory"
    assert used_by(backend) == used_by(other) == store()._used.read(), "all count in the same file"


def remove_tree(directory, what):
    paths = {
        "namespace": [directory / namespace().digest],
        "everything": list(directory.iterdir()),
        "the directory": [directory],
    }.get(what, [directory / what])
    for path in paths:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize("deleted", ["namespace", "tmp"])
def test_a_value_is_stored_although_directories_vanish_before_it_is_written(store, monkeypatch, deleted):
    backend = store()
    make_room = backend._make_room

    def clear_and_make_room(num_bytes):
        remove_tree(backend.directory, deleted)
        make_room(num_bytes)

    monkeypatch.setattr(backend, "_make_room", clear_and_make_room)
    assert put(backend, 1) == got(backend, 1) == 1
    assert (backend._root / "manifest.json").is_file()


def test_a_value_is_stored_although_directories_vanish_while_it_is_written(store, monkeypatch):
    backend = store()
    write = os.write

    def clear_and_write(file, data):
        shutil.rmtree(backend._root, ignore_errors=True)
        return write(file, data)

    monkeypatch.setattr(os, "write", clear_and_write)
    assert put(backend, 1) == 1
    monkeypatch.undo()
    assert got(backend, 1) == 1


def test_a_server_whose_directory_cannot_be_made_again_gets_a_storage_error(store):
    backend = store()
    shutil.rmtree(backend.directory)
    backend.directory.write_text("a file now")
    with pytest.raises(StorageError, match="cannot write to"):
        put(backend, 1)


def test_what_is_removed_is_not_counted(store):
    backend = store()
    put(backend, 1, 2)
    backend.remove(keys(1, 3))
    assert used_by(backend) == backend.usage().num_bytes == FILE_BYTES


def test_backends_that_open_a_new_directory_at_once_can_all_write(tmp_path):
    """The threads of one server, and servers that start together."""
    for round_ in range(20):
        start = threading.Barrier(8)

        def open_one(_, directory=tmp_path / f"{round_}", start=start):
            start.wait()
            backend = FileBackend(directory, namespace(), capacity_bytes=1 << 20)
            backend.close()
            return backend.can_write

        with ThreadPoolExecutor(8) as threads:
            assert all(threads.map(open_one, range(8)))


def test_within_one_put_the_first_block_is_the_last_to_go(store):
    backend = store(capacity=6 * FILE_BYTES)
    put(backend, 1, 2, 3, 4)
    put(backend, 5, 6, 7)
    assert backend.count_stored(keys(1, 2)) >= 1
    assert backend.count_stored(keys(5, 6, 7)) == 3


def test_a_prefix_in_use_outlives_newer_blocks(store):
    backend = store(capacity=10 * FILE_BYTES)
    put(backend, 1)
    for number in range(2, 11):
        put(backend, number)
        age(backend, number, 50 - number)
    age(backend, 1, 100)
    backend.touch(keys(1))
    put(backend, 11)
    assert backend.count_stored(keys(1)) == 1
    assert backend.count_stored(keys(2)) == 0


def test_a_lock_that_nobody_gives_back_is_an_error_and_no_hang(store, monkeypatch):
    backend, other = store(), store()
    monkeypatch.setattr(shared_counter, "LOCK_TIMEOUT_S", 0.05)
    with other._used.exclusive(), pytest.raises(StorageError, match="has held its lock"):
        put(backend, 1)
    assert put(backend, 1) == 1


def test_a_disk_with_room_again_is_written_to_again(store, monkeypatch):
    store()

    with monkeypatch.context() as patched:
        patched.setattr(file_backend, "open_directory", lambda *_: None)
        backend = store()
        with pytest.raises(StorageError, match="cannot be written to"):
            put(backend, 1)
    assert put(backend, 1) == 1


def test_what_is_no_file_is_a_miss_and_no_hang(store):
    backend = store()
    put(backend, 1)
    path = backend._path(keys(1)[0])
    os.unlink(path)
    os.mkfifo(path)
    assert got(backend, 1) == 0


def test_a_directory_that_everybody_can_write_to_is_refused(tmp_path):
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv").chmod(0o777)
    with pytest.raises(ConfigError, match="everybody can write"):
        FileBackend(tmp_path / "kv", namespace(), capacity_bytes=1)


def test_nobody_else_can_read_what_is_stored(store, tmp_path):
    put(store(), 1)
    for path in [tmp_path / "kv", *(tmp_path / "kv").rglob("*")]:
        assert not path.stat().st_mode & 0o077, path
