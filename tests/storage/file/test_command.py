"""The `storage` command on real directories, also while servers use them."""

import fcntl
import os
import time

import pytest

from fastdeploy_kvcache_v1 import cli
from fastdeploy_kvcache_v1.config import GIB, MIB
from fastdeploy_kvcache_v1.storage.file import command
from fastdeploy_kvcache_v1.storage.file.inventory import amount
from fastdeploy_kvcache_v1.storage.namespace import FORMAT_VERSION
from tests.storage.file.stores import FILE_BYTES, age, everything, stored
from tests.storage.values import got, keys, namespace, put

DAY_S = 24 * 60 * 60


def test_info_shows_every_namespace_and_their_sum(server, storage, directory):
    old = server(1, 2)
    server(3, model="n")
    age(old, 1, 3 * DAY_S)
    age(old, 2, 2 * DAY_S)
    status, result = storage("info")
    assert (status, result["values"], result["bytes"]) == (0, 3, 3 * FILE_BYTES)
    assert result["format_version"] == FORMAT_VERSION
    by_digest = {each["digest"]: each for each in result["namespaces"]}
    assert by_digest.keys() == {namespace().digest, namespace(model="n").digest}
    mine = by_digest[namespace().digest]
    assert (mine["values"], mine["bytes"], mine["manifest"]["model"]) == (2, 2 * FILE_BYTES, "m")
    last_used = os.stat(old._path(keys(2)[0])).st_mtime
    assert mine["last_used"] == time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(last_used))


def test_info_is_readable(server, directory, capsys):
    server(1)
    server(model="a" * 99)
    (directory / server(weight_epoch="1")._namespace.digest / "manifest.json").write_text("{")
    assert cli.main(["storage", "info", "--kvcache-storage-dir", str(directory)]) == 0
    text = capsys.readouterr().out
    assert f"{directory}: format version {FORMAT_VERSION}, 1 value (0.0 MiB)" in text
    assert "model m, weights 0, 4 tokens a block, 2 layers of key 2x4x8 float32, tensor parallel 1, by test" in text
    assert f"{namespace(model='a' * 99).digest}  empty\n    model {'a' * 24}..., " in text
    assert "manifest.json is missing or damaged" in text


@pytest.mark.parametrize(
    ("num_values", "num_bytes", "text"),
    [
        (0, 0, "0 values (0.0 MiB)"),
        (1, MIB, "1 value (1.0 MiB)"),
        (1234, GIB - MIB, "1,234 values (1023.0 MiB)"),
        (2, GIB, "2 values (1.00 GiB)"),
    ],
)
def test_amounts_are_readable(num_values, num_bytes, text):
    assert amount(num_values, num_bytes) == text


def test_info_changes_nothing(server, storage, directory):
    backend = server(1)
    age(backend, 1, DAY_S)
    before = [(path, path.stat().st_mtime_ns) for path in sorted(directory.rglob("*"))]
    storage("info")
    assert [(path, path.stat().st_mtime_ns) for path in sorted(directory.rglob("*"))] == before


def test_prune_deletes_what_was_not_used_for_so_long(server, storage):
    old, new = server(1, 2, 3), server(4, model="n")
    for number, days in ((1, 9), (2, 1.1), (3, 0.9)):
        age(old, number, days * DAY_S)
    age(new, 4, 8 * DAY_S)
    status, result = storage("prune", "--older-than", "1")
    left, other = {"values": 1, "bytes": FILE_BYTES}, namespace(model="n").digest
    deleted = {"deleted_values": 3, "deleted_bytes": 3 * FILE_BYTES, "deleted_namespaces": [other]}
    assert (status, result) == (0, {**left, **deleted})
    assert stored(old, 1, 2, 3) == [3]


@pytest.mark.parametrize(
    # The age in days and the size in values that are asked for; what of 1, 2, 3 and the other model's 4, 5 is left.
    ("days", "size", "left"),
    [(None, 3, [1, 3, 5]), (0.5, 9, [1, 3, 4, 5]), (0.5, 2, [1, 5]), (None, 0, [])],
)
def test_prune_deletes_values_beyond_either_limit_oldest_first(server, storage, days, size, left):
    old, new = server(1, 2, 3), server(4, 5, model="n")
    for backend, number, seconds in ((old, 1, 10), (old, 2, DAY_S), (old, 3, 30), (new, 4, 40), (new, 5, 20)):
        age(backend, number, seconds)
    words = ["--older-than", str(days)] if days else []
    _, result = storage("prune", *words, "--to-gib", str(size * FILE_BYTES / GIB))
    assert (result["deleted_values"], result["bytes"]) == (5 - len(left), len(left) * FILE_BYTES)
    assert stored(old, 1, 2, 3) + stored(new, 4, 5) == left


def test_values_from_the_future_are_named_and_pruned(server, storage, directory, capsys):
    backend = server(1, 2, 3)
    for number in (1, 2):
        age(backend, number, -DAY_S)
    assert storage("info")[1]["namespaces"][0]["from_the_future"] == 2
    assert cli.main(["storage", "info", "--kvcache-storage-dir", str(directory)]) == 0
    assert ", 2 from the future: check the clock\n" in capsys.readouterr().out
    assert storage("prune", "--older-than", "1")[1]["deleted_values"] == 2
    assert stored(backend, 1, 2, 3) == [3]


def test_what_prune_and_clear_delete_is_room_for_a_running_server(server, storage):
    backend = server(*range(4), capacity=4 * FILE_BYTES)
    for action in (["prune", "--to-gib", "0"], ["clear"]):
        storage(*action)
        assert backend._used.read() == 0
        put(backend, *range(4))
        assert stored(backend, *range(4)) == [0, 1, 2, 3], "nothing had to be evicted"


def test_a_wrong_count_is_corrected(server, storage):
    backend = server(1)
    backend._used.add("00", 99 * FILE_BYTES)
    storage("prune", "--older-than", "1")
    assert backend._used.read() == FILE_BYTES


def test_a_namespace_is_removed_only_while_no_server_can_make_it_again(server, storage, directory, monkeypatch):
    server(1)
    remove, removed = command.remove_if_empty, []

    def remove_while_locked(path):
        with open(directory / "used") as used, pytest.raises(BlockingIOError):
            fcntl.flock(used, fcntl.LOCK_EX | fcntl.LOCK_NB)
        removed.append(path.name)
        return remove(path)

    monkeypatch.setattr(command, "remove_if_empty", remove_while_locked)
    storage("clear")
    assert removed == [namespace().digest]


def test_left_overs_of_killed_writers_go_and_files_being_written_stay(server, storage, directory):
    server(1)
    left, fresh, ahead = (directory / "tmp" / name for name in ("12ab", "34cd", "56ef"))
    half = directory / "format.12ab"
    for action in (["prune", "--to-gib", "1"], ["clear"]):
        for path in (left, fresh, ahead, half):
            path.write_bytes(b"half")
        os.utime(left, (1, 1))
        os.utime(half, (1, 1))
        os.utime(ahead, (time.time() + DAY_S,) * 2)
        storage(*action)
        assert [path.exists() for path in (left, fresh, ahead, half)] == [False, True, False, False]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give --older-than DAYS, --to-gib GIB, or both"),
        (["--older-than", "-1"], "--older-than must be a number from 0 on, got -1"),
        (["--to-gib", "nan"], "--to-gib must be a number from 0 on, got nan"),
        (["--to-gib", "inf"], "--to-gib must be a number from 0 on, got inf"),
    ],
)
def test_prune_needs_a_number_it_can_use(server, directory, capsys, words, message):
    backend = server(1)
    assert cli.main(["storage", "prune", "--kvcache-storage-dir", str(directory), *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert stored(backend, 1) == [1]


def test_clear_leaves_an_empty_storage_directory(server, storage, directory):
    server(1, 2)
    server(3, model="n")
    status, result = storage("clear")
    assert (status, result["deleted_values"], result["values"]) == (0, 3, 0)
    assert set(result["deleted_namespaces"]) == {namespace().digest, namespace(model="n").digest}
    assert everything(directory) == ["format", "tmp", "used"]
    assert got(server(), 1) == 0


def test_clear_of_a_namespace_leaves_the_others(server, storage, directory):
    old, new, unused = server(1, 2), server(3, model="n"), server(model="o")
    _, result = storage("clear", "--namespace", namespace().digest)
    assert (result["deleted_values"], result["values"]) == (2, 1)
    assert result["deleted_namespaces"] == [namespace().digest]
    assert (stored(old, 1, 2), stored(new, 3)) == ([], [3])
    assert (directory / unused._namespace.digest).is_dir()
    assert new._used.read() == FILE_BYTES


@pytest.mark.parametrize("digest", ["0" * 32, "..", "tmp", "", "../other"])
def test_a_namespace_that_is_not_there_is_one_line(server, directory, capsys, digest):
    server(1)
    before = everything(directory)
    assert cli.main(["storage", "clear", "--kvcache-storage-dir", str(directory), "--namespace", digest]) == 2
    assert f"has no namespace {digest!r}" in capsys.readouterr().err
    assert everything(directory) == before


def test_a_server_survives_a_clear_and_stores_again(server, storage, directory):
    backend = server(1, 2)
    before = everything(directory)
    storage("clear")
    assert backend.count_stored(keys(1)) == got(backend, 1) == 0
    backend.remove(keys(1))
    assert put(backend, 1, 2) == 2
    assert got(backend, 1, 2) == 2
    assert everything(directory) == before, "the manifest too"
    assert backend._used.read() == 2 * FILE_BYTES


@pytest.mark.parametrize("argv", [[], ["info"], ["unknown"]])
def test_usage_mistakes_exit_with_2(capsys, argv):
    with pytest.raises(SystemExit) as caught:
        cli.main(["storage", *argv])
    assert caught.value.code == 2
    assert "usage: fastdeploy-kvcache storage" in capsys.readouterr().err
