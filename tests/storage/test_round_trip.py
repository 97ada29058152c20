"""A store is tried out as a server uses it, and what it does wrong is one line."""

import pytest

from fastdeploy_kvcache_v1.errors import StorageError
from fastdeploy_kvcache_v1.storage import round_trip
from fastdeploy_kvcache_v1.storage.attention_store import trial
from fastdeploy_kvcache_v1.storage.file.file_backend import FileBackend
from fastdeploy_kvcache_v1.storage.mooncake import mooncake_backend
from fastdeploy_kvcache_v1.storage.mooncake.mooncake_backend import MooncakeBackend
from fastdeploy_kvcache_v1.storage.mooncake.share import take_back_memory
from tests.storage.attention_store.stand_in import num_stored, set_faults
from tests.storage.machines import LIMIT_S
from tests.storage.mooncake.stand_in import SETTINGS, give_now
from tests.storage.values import VALUE_BYTES


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(round_trip, "NUM_VALUES", 4)
    monkeypatch.setattr(round_trip, "VALUE_BYTES", VALUE_BYTES)
    monkeypatch.setattr(round_trip, "NUM_BYTES", 4 * VALUE_BYTES)
    monkeypatch.setattr(trial, "ROLE_BYTES", 64)
    monkeypatch.setattr(trial, "_in_use", [])


@pytest.fixture(params=["file", "mooncake"])
def store(request, tmp_path, cluster, monkeypatch):
    """The class of the store, how it is tried, and what it holds."""
    if request.param == "file":
        yield FileBackend, lambda: round_trip.try_directory(tmp_path / "kv"), lambda: list(tmp_path.glob("kv/*/*/*"))
    else:
        monkeypatch.setattr(mooncake_backend.MooncakeSettings, "read", lambda _: SETTINGS)
        give_now(SETTINGS)
        yield MooncakeBackend, round_trip.try_mooncake, lambda: list(cluster.values)
        take_back_memory()


def test_what_was_tried_is_removed(store, tmp_path):
    _, tried, held = store
    assert all(0 <= seconds < LIMIT_S for seconds in tried()[:2])
    assert held() == []
    assert sorted(path.name for path in tmp_path.glob("kv/*")) in ([], ["format", "tmp", "used"])


@pytest.mark.parametrize(
    # The call that is wrong, what it does instead, and the line.
    ("call", "wrong", "line"),
    [
        ("put", lambda real, keys, values: real(keys[:3], values[:3]), "of 4 values .* only the first 3 are there"),
        ("get", lambda real, keys, values: real(keys[:3], values[:3]), "of 4 values .* 3 came back, and 3 unchanged"),
        ("get", lambda real, keys, values: flip(real(keys, values), values[1]), "4 came back, and 3 unchanged"),
        ("get", lambda real, keys, values: 4, "4 came back, and 0 unchanged"),
        ("remove", lambda real, keys: None, "a value that was removed is still there"),
        ("get", lambda real, keys, values: fail(), "the store is down"),
    ],
)
def test_a_store_that_does_not_keep_its_word_is_named_and_closed(store, monkeypatch, call, wrong, line):
    kind, tried, held = store
    real, close, closed = getattr(kind, call), kind.close, []
    monkeypatch.setattr(kind, call, lambda self, *given: wrong(lambda *some: real(self, *some), *given))
    monkeypatch.setattr(kind, "close", lambda self: (closed.append(True), close(self)))
    with pytest.raises(StorageError, match=line):
        tried()
    assert closed == [True]
    assert (held() == []) == (call != "remove"), "what was stored is removed"


def flip(result, value):
    value[0] ^= 1
    return result


def fail():
    raise StorageError("the store is down")


@pytest.mark.parametrize(
    ("faults", "line"),
    [
        ({}, None),
        ({"write": {"short": 31}}, "of 32 blocks expected in the store, only the first 31 are there"),
        ({"match": {"answer": 30}}, "only the first 30 are there"),
        ({"read": {"short": 31}}, "31 came back, and 31 unchanged"),
        ({"read": {"short": 31, "answer": 32}}, "32 came back, and 31 unchanged"),
        ({"read": {"error": "timed out"}}, "the attention store could not read: timed out"),
        ({"write": {"crash": "segment"}}, r"the attention store failed: RuntimeError\('segment'\)"),
    ],
)
def test_attention_store_is_tried_with_a_namespace_of_its_own(sdk_store, faults, line):
    set_faults(sdk_store, **faults)
    if line is None:
        trial.try_attention_store()
        assert num_stored(sdk_store) == 32
        (shard,) = sdk_store.glob("*of*")
        assert shard.name.endswith(".0of1")
        assert trial._in_use == []
        return
    with pytest.raises(StorageError, match=line):
        trial.try_attention_store()
    assert len(trial._in_use) == 1, "the SDK may still move bytes there"
