"""MooncakeBackend over FAKE Mooncake: what is asked in which pieces, who gives memory, and what each error becomes."""

import os
import socket
import threading
import time

import pytest

from fastdeploy_kvcache_v1.errors import StorageError
from fastdeploy_kvcache_v1.storage.backends import check_settings
from fastdeploy_kvcache_v1.storage.base import StorageFullError
from fastdeploy_kvcache_v1.storage.mooncake import client, mooncake_backend, process, share
from fastdeploy_kvcache_v1.storage.mooncake.client import MooncakeClient
from fastdeploy_kvcache_v1.storage.mooncake.mooncake_backend import MooncakeBackend
from fastdeploy_kvcache_v1.storage.mooncake.settings import MooncakeSettings
from fastdeploy_kvcache_v1.storage.mooncake.share import give_memory, take_back_memory
from fastdeploy_kvcache_v1.storage.settings import StorageSettings
from tests.storage.mooncake.stand_in import NOT_STORED, SETTINGS, give_now
from tests.storage.values import DIGEST, VALUE_BYTES, got, holds, keys, namespace, put, register, sealed


@pytest.fixture
def store(cluster, request):
    """Opens backends as a server does, with memory for `count` values."""

    def open_one(count=16):
        give_now(SETTINGS)
        backend = MooncakeBackend(SETTINGS, namespace())
        request.addfinalizer(backend.close)
        register(backend, count)
        return backend

    yield open_one
    take_back_memory()


def test_values_go_in_batches_and_a_hole_ends_them(store, monkeypatch):
    monkeypatch.setattr(mooncake_backend, "MOST_AT_ONCE", 4)
    asked = []
    for name in ("get", "put", "exist"):
        call = getattr(MooncakeClient, name)
        monkeypatch.setattr(
            MooncakeClient, name, lambda self, *given, call=call: asked.append(len(given[0])) or call(self, *given)
        )
    backend = store()
    assert put(backend, *range(10)) == 10
    assert got(backend, *range(10)) == 10
    backend.remove(keys(5))
    assert got(backend, *range(10)) == 5
    assert asked == [4, 4, 2, 4, 4, 2, 4, 4]
    assert backend.count_stored(keys(*range(12))) == 5
    assert asked[8:] == [12], "a question is one round trip"


def test_keys_begin_with_the_namespace(store, cluster):
    put(store(), 1)
    assert list(cluster.values) == [f"{DIGEST}.{keys(1)[0]}"]


def test_memory_is_registered_in_pieces_that_end_at_slots(store, cluster, monkeypatch):
    monkeypatch.setattr(client, "largest_registration", lambda _: 3 * VALUE_BYTES + 100)
    assert put(store(8), *range(8)) == 8
    assert cluster.registered == [3 * VALUE_BYTES, 3 * VALUE_BYTES, 2 * VALUE_BYTES]
    monkeypatch.setattr(client, "largest_registration", lambda _: VALUE_BYTES - 1)
    assert store(2).count_stored(keys(1)) == 1
    assert cluster.registered[3:] == [VALUE_BYTES] * 2, "a slot is never cut"


def test_a_process_gives_its_memory_once_and_until_it_ends(store, cluster):
    backends = [store(), store()]
    put(backends[0], 1)
    for backend in backends:
        backend.close()
    assert (len(share._given), cluster.room) == (1, SETTINGS.global_segment_size)
    take_back_memory()
    assert (len(share._given), cluster.room) == (0, 0)
    give_now(SETTINGS)
    give_memory(SETTINGS, 1)
    assert cluster.room == SETTINGS.global_segment_size


def test_memory_of_a_client_that_dies_is_given_again_until_taken_back(store, cluster, monkeypatch, caplog):
    monkeypatch.setattr(share, "PAUSE_S", 0.01)
    before = giving()
    backend = store()
    put(backend, 1)
    cluster.refusals["setup"] = -900
    with socket.socket(fileno=os.dup(share._given[SETTINGS].client._connection.fileno())) as other_end:
        other_end.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: len(cluster.setups) > 4)
    cluster.refusals.clear()
    wait_until(lambda: len(caplog.messages) == 2)
    assert put(backend, 2) == 1, "by the connection of before, which met no error"
    take_back_memory()
    wait_until(lambda: not (giving() - before))
    assert caplog.messages == [
        "the process that gives memory to mooncake has ended: the blocks in it are lost",
        "mooncake has 1 MiB of memory of this process again",
    ]
    assert cluster.room == 0


def giving():
    return {thread for thread in threading.enumerate() if thread.name == "kv-mooncake"}


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_memory_that_could_not_be_given_is_given_later(store, cluster, monkeypatch):
    monkeypatch.setattr(share, "PAUSE_S", 0.01)
    cluster.refusals["setup"] = -900
    give_memory(SETTINGS, SETTINGS.global_segment_size)
    wait_until(lambda: len(cluster.setups) > 2)
    cluster.refusals.clear()
    assert put(store(), 1) == 1


def test_memory_that_is_taken_back_while_it_is_given_is_given_no_more(cluster, monkeypatch):
    monkeypatch.setattr(share, "PAUSE_S", 0.01)
    before = giving()
    cluster.refusals["setup"] = -900
    give_memory(SETTINGS, 1 << 20)
    wait_until(lambda: cluster.setups)
    take_back_memory()
    wait_until(lambda: not (giving() - before))
    assert cluster.room == 0


def test_memory_that_is_taken_back_and_given_again_is_given_once(cluster, request, monkeypatch):
    monkeypatch.setattr(share, "PAUSE_S", 0.05)
    request.addfinalizer(take_back_memory)
    before = giving()
    cluster.refusals["setup"] = -900
    give_memory(SETTINGS, 1 << 20)
    wait_until(lambda: cluster.setups)
    take_back_memory()
    cluster.refusals.clear()
    give_now(SETTINGS)
    wait_until(lambda: len(giving() - before) == 1)
    assert cluster.room == SETTINGS.global_segment_size


def test_values_lie_in_the_memories_of_several_ranks(cluster, request):
    give_now(SETTINGS)
    request.addfinalizer(take_back_memory)
    backend = MooncakeBackend(SETTINGS, namespace())
    request.addfinalizer(backend.close)
    memories = [register(backend, 3) for _ in range(3)]
    places = [memories[2][0], memories[0][2], memories[1][1]]
    for place, key in zip(places, keys(1, 2, 3), strict=True):
        place[:] = sealed(key)
    assert backend.put(keys(1, 2, 3), places) == 3
    into = [memories[1][0], memories[2][2], memories[0][0]]
    assert backend.get(keys(1, 2, 3), into) == 3
    assert all(holds(place, key) for place, key in zip(into, keys(1, 2, 3), strict=True))
    assert cluster.registered == [3 * VALUE_BYTES] * 3


def test_who_gives_nothing_has_no_room_and_reads(store, cluster):
    backend = MooncakeBackend(SETTINGS, namespace())
    register(backend, 4)
    with pytest.raises(StorageFullError, match="no room for 2 of 2 values"):
        put(backend, 1, 2)
    put(store(), 1)
    assert got(backend, 1) == 1
    backend.close()


def test_without_room_some_are_refused_and_the_store_goes_on(store, cluster):
    backend = store(200)
    most = SETTINGS.global_segment_size // VALUE_BYTES
    with pytest.raises(StorageFullError) as told:
        put(backend, *range(200))
    assert (told.value.num_written, told.value.num_refused) == (most, 200 - most)
    assert got(backend, *range(most)) == most


@pytest.mark.parametrize("hostname", ["10.0.0.7:77", "10.0.0.7", "fe80::1"])
def test_the_client_is_set_up_with_the_settings_of_its_server(cluster, monkeypatch, hostname):
    monkeypatch.setenv("MC_LOG_LEVEL", "INFO")
    settings = MooncakeSettings("P2PHANDSHAKE", "10.0.0.1:5", hostname, 5, 6, rdma_devices="a,b")
    give_memory(settings, 15)
    wait_until(lambda: share._given[settings].client is not None)
    MooncakeClient(settings).close()
    take_back_memory()
    assert cluster.setups == [
        (hostname, "P2PHANDSHAKE", 15, 6, "rdma", "a,b", "10.0.0.1:5"),
        (hostname, "P2PHANDSHAKE", 0, 6, "rdma", "a,b", "10.0.0.1:5"),
    ]
    environment = cluster.environments[0]
    assert environment["MC_TCP_BIND_ADDRESS"] == ("fe80::1" if hostname == "fe80::1" else "10.0.0.7")
    assert (environment["MC_LOG_LEVEL"], environment["MC_RPC_TIMEOUT_MS"]) == ("INFO", "2000"), "the user's word counts"


@pytest.mark.parametrize(
    # What the client says to a call, and the line that its user reads.
    ("call", "code", "line"),
    [
        (
            "setup",
            -900,
            r"cannot connect to .* 127.0.0.1:50051 over tcp: setup says the master does not answer \(-900\)",
        ),
        ("register", -600, r"registration of 131072 bytes says wrong parameters \(-600\)"),
        ("exist", -900, r"cannot look up 2 values: the master does not answer \(-900\)"),
        ("get", -800, r"cannot load 2 values: the transfer failed \(-800\)"),
        ("put", -800, r"cannot store 2 values: the transfer failed \(-800\)"),
        ("remove", -706, r"cannot remove 2 values: in use \(-706\)"),
        ("remove", -1, r"cannot remove 2 values: error \(-1\)"),
    ],
)
def test_store_works_after_an_error_of_the_client(store, cluster, call, code, line):
    act = {"put": put, "get": got, "remove": lambda store, *some: store.remove(keys(*some))}.get(
        call, lambda store, *some: store.count_stored(keys(*some))
    )
    backend = store()
    cluster.refusals[call] = code
    with pytest.raises(StorageError, match=line):
        act(backend, 1, 2)
    cluster.refusals.clear()
    put(backend, 1, 2)
    assert got(backend, 1, 2) == 2


@pytest.mark.parametrize("code", [-702, -703, NOT_STORED, -707])
def test_what_is_not_there_now_is_a_miss(store, cluster, code):
    backend = store()
    put(backend, 1)
    cluster.refusals["get"] = code
    assert got(backend, 1) == 0
    cluster.refusals.clear()
    assert got(backend, 1) == 1, "it was not forgotten"


@pytest.mark.parametrize(
    ("fault", "line"),
    [("hangs", "mooncake's client did not answer for 0 s, and was ended"), ("ends", "client has ended")],
)
def test_a_client_that_hangs_or_ends_is_an_error_and_the_next_one_works(store, cluster, monkeypatch, fault, line):
    backend = store()
    put(backend, 1)
    monkeypatch.setattr(client, "CALL_TIMEOUT_S", 0.05 if fault == "hangs" else 10)
    cluster.fault = fault
    with pytest.raises(StorageError, match=line):
        backend.count_stored(keys(1))
    assert cluster.killed.is_set()
    cluster.fault = None
    monkeypatch.setattr(client, "CALL_TIMEOUT_S", 10)
    with pytest.raises(StorageError, match="client has ended"):
        backend.count_stored(keys(1))
    backend.close()
    assert got(backend, 1) == 1


def test_it_is_opened_by_name_from_the_environment(store, cluster, monkeypatch):
    monkeypatch.setenv("MOONCAKE_MASTER_SERVER_ADDR", "10.0.0.1:5")
    monkeypatch.setenv("MOONCAKE_METADATA_SERVER", "P2PHANDSHAKE")
    monkeypatch.setenv("MOONCAKE_LOCAL_HOSTNAME", "10.0.0.7")
    monkeypatch.setenv("MOONCAKE_RDMA_DEVICES", "a,b")
    settings = StorageSettings("mooncake")
    check_settings(settings)
    backend = settings.kind.open(settings, namespace())
    assert backend.count_stored(keys(1)) == 0
    backend.close()
    assert [setup[5:] for setup in cluster.setups] == [("a,b", "10.0.0.1:5")] * 2
    settings.kind.beside(settings, 3)
    wait_until(lambda: all(each.client for each in share._given.values()))
    assert cluster.setups[2][2] == 3 << 30, "for each rank"
    take_back_memory()
    cluster.refusals["setup"] = -900
    with pytest.raises(StorageError, match="cannot connect to mooncake's master"):
        check_settings(settings)


def test_the_process_ends_when_the_other_end_of_its_connection_is_closed(monkeypatch):
    ours, theirs = socket.socketpair()
    closed, ended = [], []
    monkeypatch.setattr(os, "_exit", lambda code: ended.append((code, list(closed))))
    threading.Timer(0.02, lambda: (closed.append(True), ours.close())).start()
    with theirs:
        process._end_with(theirs.fileno())
    assert ended == [(0, [True])]
