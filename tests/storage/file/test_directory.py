"""The directory of the file store: whose it is, and what happens when it is deleted under a running server."""

import os
import shutil

import pytest

from fastdeploy_kvcache_v1.errors import ConfigError, StorageError
from fastdeploy_kvcache_v1.storage.file import directory as storage_directory
from fastdeploy_kvcache_v1.storage.file.directory import Identity
from fastdeploy_kvcache_v1.storage.file.file_backend import FileBackend
from tests.forked import ended_well, start
from tests.storage.file.stores import FILE_BYTES, used_by
from tests.storage.values import got, keys, namespace, put


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


@pytest.fixture
def another_user(monkeypatch):
    """Becomes one: files of this test belong to `ME` then."""

    def become():
        monkeypatch.setattr(os, "geteuid", lambda: ME + 1)
        monkeypatch.setattr(storage_directory, "ROOT", ME + 2)

    return become


ME = os.geteuid()


@pytest.mark.parametrize(
    # What is in the directory, its mode, whether another user opens it, and the refusal.
    ("files", "mode", "is_another", "refusal"),
    [
        ({"format": "fastdeploy-kvcache-v1 storage 0\n"}, 0o700, False, "another version.*, or delete it: rm -r /"),
        ({"letter.txt": "Dear"}, 0o700, False, "holds other files"),
        ({}, 0o777, False, r"other users can write to .* \(mode 777\): chmod 700 it"),
        ({}, 0o770, False, r"\(mode 770\): chmod 700 it"),
        ({}, 0o720, False, r"\(mode 720\): chmod 700 it"),
        ({}, 0o700, True, f"belongs to user {ME}, and this process to user {ME + 1}: chown it"),
    ],
)
def test_a_directory_that_is_not_ours_alone_is_refused_and_left_as_it_is(
    tmp_path, another_user, files, mode, is_another, refusal
):
    (tmp_path / "kv").mkdir()
    for name, text in files.items():
        (tmp_path / "kv" / name).write_text(text)
    (tmp_path / "kv").chmod(mode)
    if is_another:
        another_user()
    with pytest.raises(ConfigError, match=refusal):
        FileBackend(tmp_path / "kv", namespace(), capacity_bytes=1)
    assert {path.name: path.read_text() for path in (tmp_path / "kv").iterdir()} == files


def test_a_namespace_that_others_can_write_to_is_refused(store, directory):
    put(store(), 1)
    (directory / namespace().digest).chmod(0o770)
    with pytest.raises(ConfigError, match=rf"{namespace().digest} \(mode 770\): chmod 700 it"):
        store()


def replaced_by_another(backend):
    shutil.rmtree(backend.directory)
    backend.directory.mkdir()
    (backend.directory / "letter").write_text("Dear")


def replaced_by_a_file(backend):
    shutil.rmtree(backend.directory)
    backend.directory.write_text("Dear")


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        (lambda backend: backend.directory.chmod(0o777), "other users can write"),
        (replaced_by_another, "holds other files"),
        (replaced_by_a_file, "Not a directory"),
    ],
    ids=["mode 777", "another directory", "a file"],
)
def test_what_a_start_refuses_a_running_server_does_not_use(store, change, refusal):
    backend = store()
    put(backend, 1)
    change(backend)
    before = sorted(backend.directory.parent.rglob("*"))
    for use in (put, got, lambda store, number: store.count_stored(keys(number)), lambda store, number: remove(store)):
        with pytest.raises(StorageError, match=refusal):
            use(backend, 1)
    assert sorted(backend.directory.parent.rglob("*")) == before


def remove(backend):
    backend.remove(keys(1))


def test_a_directory_that_is_private_again_is_used_again(store):
    backend = store()
    put(backend, 1)
    backend.directory.chmod(0o770)
    with pytest.raises(StorageError, match="mode 770"):
        put(backend, 2)
    backend.directory.chmod(0o700)
    assert put(backend, 2) == 1
    assert got(backend, 1, 2) == 2


@pytest.mark.parametrize("left", ["nothing", "the mount point"])
def test_nothing_is_written_below_a_disk_that_is_unmounted(store, monkeypatch, left):
    backend = store()
    put(backend, 1)
    shutil.rmtree(backend.directory)
    if left == "the mount point":
        backend.directory.mkdir()
    below, on_disk = sorted(backend.directory.parent.iterdir()), Identity.of
    monkeypatch.setattr(Identity, "of", lambda path: on_disk(path)._replace(device=on_disk(path).device + 1))
    for _ in range(2):
        with pytest.raises(StorageError, match=r"the disk of the storage directory .* is gone: mount it"):
            put(backend, 2)
    assert sorted(backend.directory.parent.rglob("*")) == below


def test_who_starts_at_the_same_time_in_another_container_is_not_hindered(tmp_path, monkeypatch):
    """Where processes have the same numbers."""
    rename, names = os.rename, []

    def write_the_same_before(old, new):
        names.append(old)
        if len(names) == 1:
            storage_directory._write_text(tmp_path / "format", "text", tmp_path)
        rename(old, new)

    monkeypatch.setattr(os, "rename", write_the_same_before)
    storage_directory._write_text(tmp_path / "format", "text", tmp_path)
    assert len(set(names)) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["format"]


def test_a_directory_that_became_another_users_is_not_written_to(store, another_user):
    backend = store()
    put(backend, 1)
    remove_tree(backend.directory, "everything")
    another_user()
    with pytest.raises(StorageError, match="belongs to user"):
        put(backend, 2)
    assert list(backend.directory.iterdir()) == []


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


def test_a_text_that_a_crash_has_cut_is_written_anew(store):
    manifest = store().directory / namespace().digest / "manifest.json"
    manifest.write_text("{")
    store()
    assert manifest.read_text() == namespace().manifest()
    before = manifest.stat().st_ino
    store()
    assert manifest.stat().st_ino == before, "one that is whole stays"


def remove_tree(root, what):
    paths = {"namespace": [root / namespace().digest], "everything": list(root.iterdir()), "the directory": [root]}.get(
        what, [root / what]
    )
    for path in paths:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize("deleted", ["namespace", "tmp"])
def test_value_is_stored_although_directories_vanish_before_the_write(store, monkeypatch, deleted):
    backend = store()
    make_room = backend._eviction.make_room

    def clear_and_make_room(*given):
        remove_tree(backend.directory, deleted)
        make_room(*given)

    monkeypatch.setattr(backend._eviction, "make_room", clear_and_make_room)
    assert put(backend, 1) == got(backend, 1) == 1
    assert (backend._root / "manifest.json").is_file()


def test_directory_that_cannot_be_made_again_is_a_storage_error(store):
    backend = store()
    shutil.rmtree(backend.directory)
    backend.directory.write_text("a file now")
    with pytest.raises(StorageError, match="Not a directory"):
        put(backend, 1)


def test_nobody_else_can_read_what_is_stored(store, tmp_path):
    put(store(), 1)
    for path in [tmp_path / "kv", *(tmp_path / "kv").rglob("*")]:
        assert not path.stat().st_mode & 0o077, path
