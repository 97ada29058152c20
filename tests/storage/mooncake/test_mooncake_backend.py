"""MooncakeBackend on a real master and real memory: what its client does with what no contract promises."""

import contextlib
import signal

import pytest

from fastdeploy_kvcache_v1.errors import ConfigError, StorageError
from fastdeploy_kvcache_v1.storage.backends import open_backend
from fastdeploy_kvcache_v1.storage.base import StorageFullError
from fastdeploy_kvcache_v1.storage.mooncake import client as client_module
from fastdeploy_kvcache_v1.storage.mooncake import mooncake_backend, share
from fastdeploy_kvcache_v1.storage.mooncake.client import MooncakeClient
from fastdeploy_kvcache_v1.storage.mooncake.mooncake_backend import MooncakeBackend
from fastdeploy_kvcache_v1.storage.mooncake.settings import MooncakeSettings
from fastdeploy_kvcache_v1.storage.settings import StorageSettings
from tests.mooncake_master import SEGMENT_BYTES, needs_mooncake
from tests.storage.values import VALUE_BYTES, empty, holds, keys, namespace, register, sealed, values

pytestmark = [pytest.mark.process, needs_mooncake()]

MANY = 2500
"""More than the client takes at once."""


def fill(backend, *numbers):
    for buffer, key in zip(backend.slots, keys(*numbers), strict=False):
        buffer[:] = sealed(key)
    return backend.slots[: len(numbers)]


def put(backend, *numbers):
    return backend.put(keys(*numbers), fill(backend, *numbers))


def test_batches_of_any_size_arrive(store):
    writer, reader = store(MANY), store(MANY)
    assert put(writer, *range(MANY)) == MANY
    assert reader.count_stored(keys(*range(MANY + 1))) == MANY
    assert reader.get(keys(*range(MANY)), reader.slots) == MANY
    assert all(holds(buffer, key) for buffer, key in zip(reader.slots, keys(*range(MANY)), strict=True))


def test_a_question_is_one_round_trip(store, monkeypatch):
    asked = []
    exist = MooncakeClient.exist
    monkeypatch.setattr(MooncakeClient, "exist", lambda self, names: asked.append(len(names)) or exist(self, names))
    assert store().count_stored(keys(*range(2048))) == 0
    assert asked == [2048]


def test_a_hole_in_the_middle_of_a_batch_ends_it(store, monkeypatch):
    monkeypatch.setattr(mooncake_backend, "MOST_AT_ONCE", 4)
    backend = store()
    put(backend, 0, 1, 2, 3, 4, 6, 7, 8)
    assert backend.get(keys(*range(10)), backend.slots[:10]) == 5
    assert all(holds(buffer, key) for buffer, key in zip(backend.slots, keys(*range(5)), strict=False))


def test_memory_is_registered_in_pieces_that_end_at_slots(store, monkeypatch):
    monkeypatch.setattr(mooncake_backend, "largest_registration", lambda _: 3 * VALUE_BYTES + 100)
    backend = store(8)
    assert backend._mapped().largest_registration == 3 * VALUE_BYTES
    assert put(backend, *range(8)) == 8
    for slot in backend.slots:
        slot[:] = bytes(VALUE_BYTES)
    assert backend.get(keys(*range(8)), backend.slots) == 8
    assert all(holds(buffer, key) for buffer, key in zip(backend.slots, keys(*range(8)), strict=True))


def test_a_process_gives_its_memory_once_and_keeps_giving_it(settings, store):
    backends = [store(), store()]
    assert len(share._given) == 1
    put(backends[0], 1)
    for backend in backends:
        backend.close()
    assert len(share._given) == 1
    assert store().count_stored(keys(1)) == 1, "what lies in it outlives the connections"


def test_who_registers_nothing_gives_nothing(settings):
    backend = MooncakeBackend(settings, namespace())
    assert share._given == {}
    with pytest.raises(StorageFullError, match="no room for 1 of 1 values"):
        backend.put(keys(1), values(keys(1)))
    backend.close()


def test_small_values_need_no_registration(settings, store):
    """The commit markers of the engine, which has no host slots."""
    store()
    backend = MooncakeBackend(settings, namespace())
    assert backend.put(keys(1, 2), values(keys(1, 2))) == 2
    buffers = empty(2)
    assert backend.get(keys(1, 2), buffers) == 2
    assert all(holds(buffer, key) for buffer, key in zip(buffers, keys(1, 2), strict=True))
    backend.close()


def test_without_room_some_are_refused_and_the_store_goes_on(start_master, monkeypatch):
    """Nothing can be evicted here, because all is in use."""
    monkeypatch.setattr(client_module, "LEAVE_TIMEOUT_S", 0.0)
    settings = MooncakeSettings.read(start_master("-default_kv_lease_ttl=1h").environment())
    backend = MooncakeBackend(settings, namespace())
    slots = register(backend, 1000)

    def put_twice_the_room():
        for begin in range(0, 2 * SEGMENT_BYTES // VALUE_BYTES, 1000):
            some = keys(*range(begin, begin + 1000))
            assert backend.put(some, slots) == 1000
            backend.touch(some)

    try:
        with pytest.raises(StorageFullError) as told:
            put_twice_the_room()
        assert told.value.num_refused > 0
        assert told.value.num_written + told.value.num_refused == 1000
        assert backend.count_stored(keys(0)) == 1, "the connection works"
    finally:
        backend.close()
        share.take_back_memory()


def test_a_value_under_the_name_of_another_one_is_not_sealed(store):
    backend = store()
    backend.put(keys(1), fill(backend, 2))
    (buffer,) = fill(backend, 7)
    assert backend.get(keys(1), [buffer]) == 1
    assert not holds(buffer, keys(1)[0])


def test_a_client_that_crashes_is_an_error_and_the_next_one_works(store):
    backend = store()
    put(backend, 1)
    backend._client._process.kill()
    with pytest.raises(StorageError, match="the process of mooncake's client has ended"):
        backend.get(keys(1), backend.slots[:1])
    backend.close()
    assert backend.get(keys(1), backend.slots[:1]) == 1


def test_a_client_that_hangs_is_ended_at_its_deadline(store, monkeypatch):
    backend = store()
    put(backend, 1)
    process = backend._client._process
    monkeypatch.setattr(client_module, "CALL_TIMEOUT_S", 0.2)
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(StorageError, match="did not answer for 0 s, and was ended"):
        backend.get(keys(1), backend.slots[:1])
    assert process.returncode == -signal.SIGKILL
    monkeypatch.undo()
    backend.close()
    assert backend.get(keys(1), backend.slots[:1]) == 1


def test_a_client_ends_with_the_process_that_uses_it_even_while_it_waits(store, settings):
    backend = store()
    put(backend, 1)
    process = backend._client._process
    share._given[settings]._process.send_signal(signal.SIGSTOP)
    backend._client._connection.send(("get", backend._names(keys(1)), [0], [VALUE_BYTES]))
    backend._client._connection.close()  # as the end of this process would
    assert process.wait(20) == 0
    share._given[settings]._process.send_signal(signal.SIGCONT)


def test_it_is_opened_by_name_from_the_environment(master, monkeypatch):
    for name, value in master.environment().items():
        monkeypatch.setenv(name, value)
    backend = open_backend(StorageSettings("mooncake"), namespace(), rank=1)
    assert isinstance(backend, MooncakeBackend)
    assert backend.count_stored(keys(1)) == 0
    backend.close()


@pytest.mark.parametrize(
    ("module", "line"),
    [
        (None, r"pip install 'mooncake-transfer-engine-non-cuda>=0\.3\.12\.post1'"),
        ("raise ImportError('libibverbs.so.1: cannot open')", r"\(libibverbs.so.1: cannot open\): apt-get install lib"),
    ],
)
def test_what_is_not_installed_is_one_line(settings, monkeypatch, tmp_path, module, line):
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").touch()
    if module is not None:
        (tmp_path / "mooncake" / "store.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=line) as told:
        MooncakeBackend(settings, namespace()).count_stored(keys(1))
    assert "\n" not in str(told.value)


def test_a_master_that_is_away_is_an_error(settings, master):
    master.kill()
    backend = MooncakeBackend(settings, namespace())
    with pytest.raises(StorageError, match=f"cannot connect to mooncake's master {master.address} over tcp: setup"):
        backend.count_stored(keys(1))


def test_what_is_touched_is_evicted_last(start_master):
    settings = MooncakeSettings.read(start_master("-default_kv_lease_ttl=50").environment())
    backend = MooncakeBackend(settings, namespace())
    slots = register(backend, 500)
    try:
        used, unused = keys(*range(100)), keys(*range(100, 500))
        backend.put([*used, *unused], slots)
        for begin in range(500, 500 + 2 * SEGMENT_BYTES // VALUE_BYTES, 500):
            backend.touch(used)
            with contextlib.suppress(StorageFullError):  # until it has evicted
                backend.put(keys(*range(begin, begin + 500)), slots)
        assert sum(backend._exist(unused)) < len(unused), "it evicts"
        assert sum(backend._exist(used)) / len(used) > sum(backend._exist(unused)) / len(unused)
    finally:
        backend.close()
        share.take_back_memory()
