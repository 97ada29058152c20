"""The `storage` command touches nothing that servers do not write."""

import os
import shutil

import pytest

from fastdeploy_kvcache_v1 import cli
from tests.storage.file.stores import FILE_BYTES, everything, stored
from tests.storage.values import keys, namespace, put

ACTIONS = (["info"], ["verify"], ["verify", "--repair"], ["prune", "--to-gib", "0"], ["clear"])


@pytest.mark.parametrize(
    ("format_", "refusal"),
    [
        ("fastdeploy-kvcache-v1 storage 0\n", "another version"),
        (None, "is not a storage directory"),
        ("no directory", "is not a storage directory"),
    ],
)
@pytest.mark.parametrize("action", ACTIONS, ids=" ".join)
def test_a_directory_that_is_not_ours_is_one_line_and_left_alone(server, directory, capsys, action, format_, refusal):
    server(1)
    if format_ is None:
        (directory / "format").unlink()
    elif format_ == "no directory":
        shutil.rmtree(directory)
    else:
        (directory / "format").write_text(format_)
    before = everything(directory)
    assert cli.main(["storage", *action, "--kvcache-storage-dir", str(directory)]) == 2
    error = capsys.readouterr().err
    assert refusal in error
    assert error.count("\n") == 1
    assert everything(directory) == before


@pytest.mark.parametrize("link", ["namespace", "shard", "value", "tmp"])
def test_what_a_symbolic_link_leads_to_is_neither_counted_nor_deleted(server, storage, directory, tmp_path, link):
    backend = server(1)
    outside = tmp_path / "outside"
    inside = {
        "namespace": directory / ("0" * 32),
        "shard": directory / namespace().digest / "00",
        "value": directory / namespace().digest / keys(1)[0][:2] / "linked",
        "tmp": directory / "tmp",
    }[link]
    theirs = outside / "ab" / keys(1)[0]
    theirs.parent.mkdir(parents=True)
    for path in (theirs, outside / "letter"):
        path.write_text("Dear")
        os.utime(path, (1, 1))
    if link == "tmp":
        inside.rmdir()
    inside.symlink_to(theirs if link == "value" else outside if link != "shard" else theirs.parent)
    assert storage("info")[1]["values"] == 1
    assert storage("verify", "--repair")[0] == 0
    storage("prune", "--older-than", "1", "--to-gib", "0")
    storage("clear")
    assert [path.read_text() for path in (theirs, outside / "letter")] == ["Dear", "Dear"]
    assert stored(backend, 1) == []


def test_an_eviction_deletes_nothing_behind_a_symbolic_link(server, directory, tmp_path):
    theirs = tmp_path / "outside" / "ab" / "letter"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("Dear")
    os.utime(theirs, (1, 1))
    backend = server(1, 2, capacity=2 * FILE_BYTES)
    (directory / ("0" * 32)).symlink_to(tmp_path / "outside")
    put(backend, 3)
    assert theirs.read_text() == "Dear"


def test_files_that_servers_do_not_write_stay(server, storage, directory):
    """In the directory, in a namespace, and in one that looks like one."""
    server(1)
    others = [directory / "letter", directory / namespace().digest / "letter", directory / ("0" * 31) / "ab" / "letter"]
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("Dear")
    storage("clear")
    assert [path.read_text() for path in others] == ["Dear"] * 3
