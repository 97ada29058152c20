"""Presence: an owner waits for its visitors, and who was killed is gone."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from fastdeploy_kvcache_v1.transfer import presence
from fastdeploy_kvcache_v1.transfer.presence import Presence, Visit
from tests.transfer.peer import ChildProcess, own


@pytest.fixture
def owner(tmp_path):
    made = Presence(tmp_path)
    yield made
    if Path(made.path).exists():
        made.close(0)


def test_an_owner_leaves_at_once_when_nobody_is_there(owner, tmp_path):
    assert owner.close(0)
    assert not list(tmp_path.iterdir())
    with pytest.raises(FileNotFoundError):
        Visit(owner.path)


def test_an_owner_waits_for_the_last_visitor_and_lets_nobody_in_behind_it(owner):
    visits = [Visit(owner.path) for _ in range(2)]
    ends = []
    thread = threading.Thread(target=lambda: ends.append(owner.close(60)))
    thread.start()
    visits.pop().close()
    thread.join(0.1)
    assert thread.is_alive()
    assert visits[0].owner_is_alive()
    visits.pop().close()
    thread.join(60)
    assert ends == [True]
    with pytest.raises(FileNotFoundError):
        Visit(owner.path)


def test_an_owner_that_does_not_wait_is_gone_for_its_visitors(owner):
    visitor = Visit(owner.path)
    assert visitor.owner_is_alive()
    assert not owner.close(0.05)
    assert not visitor.owner_is_alive()
    visitor.close()


@pytest.mark.parametrize("is_there", [True, False])
def test_it_lies_in_shared_memory_where_there_is_some(monkeypatch, tmp_path, is_there):
    monkeypatch.setattr(presence.os, "access", lambda path, mode: is_there)
    monkeypatch.setattr(presence.tempfile, "gettempdir", lambda: str(tmp_path))
    made = Presence()
    assert Path(made.path).parent == (Path("/dev/shm") if is_there else tmp_path)
    assert made.close(0)


def test_a_file_without_an_owner_is_no_owner(tmp_path):
    path = tmp_path / "fastdeploy-kvcache-owner-0"
    path.touch()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        Visit(str(path))
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.process
def test_a_killed_owner_is_gone_and_its_file_goes_with_the_next_one(tmp_path, owner):
    child = ChildProcess(own, tmp_path)
    visitor = Visit(child.hello)
    assert visitor.owner_is_alive()
    child.kill()
    assert not visitor.owner_is_alive()
    with pytest.raises(FileNotFoundError):
        Visit(child.hello)
    assert Path(child.hello).exists()
    Presence(tmp_path).close(0)
    assert not Path(child.hello).exists()
    assert Path(owner.path).exists(), "of one that lives"
