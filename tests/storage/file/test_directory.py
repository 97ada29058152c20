"""The directory of the file store: whose it is, and what happens when it is deleted under a running server."""

import contextlib
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from fastdeploy_kvcache_v1.errors import ConfigError, StorageError
from fastdeploy_kvcache_v1.storage.file import directory
from fastdeploy_kvcache_v1.storage.file.directory import check_directory
from fastdeploy_kvcache_v1.storage.file.file_backend import FileBackend
from tests.forked import ended_well, start
from tests.storage.file.stores import FILE_BYTES, used_by
from tests.storage.values import got, namespace, put


@pytest.mark.process
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

    assert ended_well(start(use, user=65534))


def allow_everybody_to_read(root):
    for parent in root.parents[:3]:
        parent.chmod(0o755)
    for path in [root, *root.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)


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


def remove_tree(root, what):
    paths = {
        "namespace": [root / namespace().digest],
        "everything": list(root.iterdir()),
        "the directory": [root],
    }.get(what, [root / what])
    for path in paths:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize("deleted", ["namespace", "tmp"])
def test_a_value_is_stored_although_directories_vanish_before_it_is_written(store, monkeypatch, deleted):
    backend = store()
    make_room = backend._make_room

    def clear_and_make_room(*given):
        remove_tree(backend.directory, deleted)
        make_room(*given)

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


def test_a_directory_that_everybody_can_write_to_is_refused(tmp_path):
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv").chmod(0o777)
    with pytest.raises(ConfigError, match="everybody can write"):
        FileBackend(tmp_path / "kv", namespace(), capacity_bytes=1)


def test_a_directory_of_another_user_is_refused_and_left_as_it_is(tmp_path, monkeypatch):
    (tmp_path / "kv").mkdir()
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    monkeypatch.setattr(directory, "ROOT", me + 2)
    with pytest.raises(ConfigError, match=f"belongs to user {me}, and this process to user {me + 1}: chown it"):
        FileBackend(tmp_path / "kv", namespace(), capacity_bytes=1)
    assert list((tmp_path / "kv").iterdir()) == []


@pytest.mark.process
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
@pytest.mark.parametrize(
    ("owner", "refusal"),
    [(1, "belongs to user 1, and this process to user 2"), (2, None), (0, "cannot be made: Permission denied")],
    ids=["another user's", "one's own", "root's, which is trusted, and can only be read"],
)
def test_a_user_trusts_its_own_directories_and_those_of_root(tmp_path, owner, refusal):
    allow_everybody_to_read(tmp_path)
    (tmp_path / "kv").mkdir(mode=0o755)
    os.chown(tmp_path / "kv", owner, -1)

    def use():
        with pytest.raises(ConfigError, match=refusal) if refusal else contextlib.nullcontext():
            check_directory(tmp_path / "kv")

    assert ended_well(start(use, user=2))


def test_a_directory_that_became_another_users_is_not_written_to(store, monkeypatch):
    backend = store()
    put(backend, 1)
    remove_tree(backend.directory, "everything")
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    monkeypatch.setattr(directory, "ROOT", me + 2)
    with pytest.raises(StorageError, match="belongs to user"):
        put(backend, 2)
    assert list(backend.directory.iterdir()) == []


def test_nobody_else_can_read_what_is_stored(store, tmp_path):
    put(store(), 1)
    for path in [tmp_path / "kv", *(tmp_path / "kv").rglob("*")]:
        assert not path.stat().st_mode & 0o077, path
