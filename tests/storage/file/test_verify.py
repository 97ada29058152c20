"""`storage verify`: every damaged value is found, and nothing else is called damaged."""

import errno
import os
import sys

import pytest

from fastdeploy_kvcache_v1 import cli
from fastdeploy_kvcache_v1.storage.file import verification
from tests.storage.file.stores import FILE_BYTES, damage, flip_a_byte, stored
from tests.storage.values import keys, namespace, sealed


def test_verify_finds_nothing_wrong_with_what_was_stored(server, storage):
    server(1, 2)
    server(3, model="n")
    wrong = dict.fromkeys(("vanished_values", "damaged_values", "deleted_values"), 0)
    assert storage("verify") == (0, {"values": 3, "bytes": 3 * FILE_BYTES, "damaged": [], **wrong})


@pytest.mark.parametrize(
    "how",
    [
        flip_a_byte,
        lambda file: file.truncate(0),
        lambda file: file.truncate(FILE_BYTES - 1),
        lambda file: file.truncate(63),
        lambda file: file.write(sealed(keys(1)[0])),
        lambda file: file.write(sealed(keys(2)[0], namespace(model="n").digest)),
    ],
    ids=["a changed byte", "empty", "cut", "shorter than a trailer", "another value", "of another namespace"],
)
def test_verify_names_a_damaged_value_and_repair_deletes_it(server, storage, directory, how):
    backend = server(1, 2, 3)
    damage(backend, 2, how)
    path = os.path.relpath(backend._path(keys(2)[0]), directory)
    status, result = storage("verify")
    assert (status, result["damaged"], result["deleted_values"]) == (1, [path], 0)
    assert stored(backend, 1, 2, 3) == [1, 2, 3], "only --repair deletes"
    status, result = storage("verify", "--repair")
    assert (status, result["damaged"], result["deleted_values"]) == (1, [path], 1)
    assert stored(backend, 1, 2, 3) == [1, 3]
    assert backend._used.read() == 2 * FILE_BYTES
    assert storage("verify")[0] == 0


def test_a_value_that_vanishes_while_it_is_verified_is_no_error(server, storage, monkeypatch):
    server(1, 2)
    whole = verification.is_whole

    def evicted_just_before(path, namespace):
        if path.endswith(keys(1)[0]):
            os.unlink(path)
        return whole(path, namespace)

    monkeypatch.setattr(verification, "is_whole", evicted_just_before)
    status, result = storage("verify")
    assert (status, result["values"], result["vanished_values"], result["damaged_values"]) == (0, 1, 1, 0)


@pytest.fixture
def refuses(monkeypatch):
    """Opening a value fails."""

    def refuse(backend, number, code):
        path, really_open = backend._path(keys(number)[0]), os.open

        def broken(name, *rest, **more):
            if name == path:
                raise OSError(code, os.strerror(code), name)
            return really_open(name, *rest, **more)

        monkeypatch.setattr(os, "open", broken)
        return path

    return refuse


def test_a_value_that_the_disk_cannot_read_is_damaged(server, storage, refuses):
    backend = server(1, 2)
    refuses(backend, 1, errno.EIO)
    status, result = storage("verify", "--repair")
    assert (status, result["damaged_values"]) == (1, 1)
    assert stored(backend, 1, 2) == [2]


def test_a_value_that_may_not_be_read_is_one_line_and_is_kept(server, directory, capsys, refuses):
    backend = server(1)
    path = refuses(backend, 1, errno.EACCES)
    assert cli.main(["storage", "verify", "--repair", "--kvcache-storage-dir", str(directory)]) == 2
    assert capsys.readouterr().err == f"fastdeploy-kvcache: error: {path}: Permission denied\n"
    assert stored(backend, 1) == [1]


def test_many_damaged_values_are_counted_and_some_are_named(server, directory, capsys):
    backend = server(*range(12))
    for number in range(12):
        damage(backend, number, flip_a_byte)
    assert cli.main(["storage", "verify", "--kvcache-storage-dir", str(directory)]) == 1
    text = capsys.readouterr().out
    assert "checked 12 values (0.1 MiB): 12 damaged\n" in text
    assert text.count(namespace().digest) == 10
    assert "and 2 more" in text
    assert "--repair deletes them" in text
    assert cli.main(["storage", "verify", "--repair", "--kvcache-storage-dir", str(directory)]) == 1
    assert "12 damaged, deleted\n" in (text := capsys.readouterr().out)
    assert "--repair" not in text


def test_verify_without_the_checksum_library_says_how_to_get_it(server, directory, capsys, monkeypatch):
    server(1)
    for name in ("file.verification", "seal"):
        monkeypatch.delitem(sys.modules, f"fastdeploy_kvcache_v1.storage.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "xxhash", None)
    assert cli.main(["storage", "verify", "--kvcache-storage-dir", str(directory)]) == 2
    assert "needs the package xxhash: pip install" in capsys.readouterr().err
