"""MooncakeBackend when master, network or peers fail: an error within the deadline, and after that all works again."""

import itertools
import signal
import time

import psutil
import pytest

from fastdeploy_kvcache_v1.errors import ConfigError, StorageError
from fastdeploy_kvcache_v1.storage.base import StorageFullError
from fastdeploy_kvcache_v1.storage.mooncake import client, share
from fastdeploy_kvcache_v1.storage.mooncake.mooncake_backend import MooncakeBackend
from fastdeploy_kvcache_v1.storage.mooncake.settings import MooncakeSettings
from tests.fault_proxy import Fault, FaultProxy
from tests.mooncake_master import Master, needs_mooncake
from tests.storage.mooncake.stand_in import give_now
from tests.storage.store_host import StoreHost
from tests.storage.values import VALUE_BYTES, got, keys, namespace, put, register

pytestmark = [pytest.mark.process, needs_mooncake()]

LIMIT_S = 60.0
COUNT = 32


def healed(call):
    """What `call` returns once the store works again. A backend that failed is closed, as lanes do."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            return call()
        except StorageError:
            assert time.monotonic() < deadline, "it does not heal"
            time.sleep(0.1)


@pytest.fixture
def master(tmp_path):
    master = Master(tmp_path)
    yield master
    master.kill()


@pytest.fixture
def settings(master):
    return MooncakeSettings.read(master.environment())


@pytest.fixture
def store(settings, monkeypatch, request):
    """Opens backends as servers do, with memory of their own in `slots`. The store has 64 MiB."""
    monkeypatch.setattr(client, "LEAVE_TIMEOUT_S", 0.0)
    give_now(settings)

    def open_store(count):
        backend = MooncakeBackend(settings, namespace())
        request.addfinalizer(lambda: (backend.close(), backend.close()))
        register(backend, count)
        return backend

    yield open_store
    share.take_back_memory()


@pytest.fixture
def proxy(master):
    proxy = FaultProxy(master.port)
    yield proxy
    proxy.close()


@pytest.fixture
def behind_proxy(master, proxy, store):
    """A backend that reaches the master through the proxy; what it reads lies in memory that does not."""
    backend = MooncakeBackend(MooncakeSettings.read(master.environment(proxy.address)), namespace())
    backend.slots = register(backend, COUNT)
    yield backend
    proxy.fault = Fault.NONE
    backend.close()


@pytest.mark.parametrize("fault", [Fault.HANG, Fault.RESET])
def test_a_master_that_is_not_reached_is_an_error_until_it_is(store, behind_proxy, proxy, fault):
    put(store(COUNT), *range(COUNT))
    assert got(behind_proxy, *range(COUNT)) == COUNT
    proxy.fault = fault
    for call in (
        lambda: behind_proxy.count_stored(keys(1)),
        lambda: behind_proxy.get(keys(1), behind_proxy.slots[:1]),
        lambda: behind_proxy.put(keys(200), behind_proxy.slots[:1]),
    ):
        with pytest.raises(StorageError):
            call()
    proxy.fault = Fault.NONE
    behind_proxy.close()
    assert healed(lambda: got(behind_proxy, *range(COUNT))) == COUNT


def test_a_master_that_stands_still_and_goes_on_has_lost_nothing(store, master):
    backend = store(COUNT)
    put(backend, *range(COUNT))
    master.freeze()
    with pytest.raises(StorageError, match="did not answer in time"):
        backend.get(keys(1), backend.slots[:1])
    master.thaw()
    backend.close()
    assert healed(lambda: got(backend, *range(COUNT))) == COUNT


def test_killed_master_comes_back_empty_and_gets_the_memory_again(store, master):
    backend = store(COUNT)
    put(backend, *range(COUNT))
    master.kill()
    with pytest.raises(StorageError):
        backend.count_stored(keys(1))
    backend.close()
    master.start()
    assert healed(lambda: got(backend, *range(COUNT))) == 0
    assert healed(lambda: put(backend, *range(COUNT))) == COUNT, "the client that gives memory gives it again"
    assert got(backend, *range(COUNT)) == COUNT


def test_a_peer_that_dies_is_an_error_and_no_wrong_byte(store, settings):
    backend = store(COUNT)
    put(backend, *range(COUNT))
    share._given[settings].client._process.kill()
    with pytest.raises(StorageError, match="the transfer failed"):
        backend.get(keys(*range(COUNT)), backend.slots)


def test_peer_that_dies_is_started_again_and_has_room_within_a_minute(store, settings):
    backend = store(COUNT)
    put(backend, *range(COUNT))
    share._given[settings].client._process.kill()
    deadline = time.monotonic() + LIMIT_S
    for begin in itertools.count(COUNT, COUNT):
        assert time.monotonic() < deadline, "the memory was not given again"
        try:
            put(backend, *range(begin, begin + COUNT))
            break
        except StorageFullError:  # no error of the connection: nobody makes it anew
            time.sleep(0.5)
        except StorageError:  # the master believes that the lost memory is there, for 10 s
            backend.close()


def test_nothing_arrives_after_a_load_was_given_up(store, settings, monkeypatch):
    """The peer stands still while many values are under way, and goes on once the load has failed."""
    many = range(1000)
    backend = store(len(many))
    put(backend, *many)
    assert got(backend, *many) == len(many)
    peer = share._given[settings].client._process
    for buffer in backend.slots:
        buffer[:] = bytes(VALUE_BYTES)
    monkeypatch.setattr(client, "CALL_TIMEOUT_S", 1.0)
    peer.send_signal(signal.SIGSTOP)
    with pytest.raises(StorageError, match="did not answer"):
        backend.get(keys(*many), backend.slots)
    monkeypatch.setattr(client, "CALL_TIMEOUT_S", LIMIT_S)
    before = [bytes(buffer) for buffer in backend.slots]
    peer.send_signal(signal.SIGCONT)
    other = store(len(many))
    assert healed(lambda: got(other, *many)) in (0, len(many)), "the peer goes on"
    assert [bytes(buffer) for buffer in backend.slots] == before


def test_store_process_that_is_killed_takes_its_clients_along_and_no_value(master, monkeypatch, tmp_path):
    """Two ranks: three clients for the store process, and one that gives memory, which is the engine's."""
    monkeypatch.setattr(client, "LEAVE_TIMEOUT_S", 0.0)
    for name, value in master.environment().items():
        monkeypatch.setenv(name, value)
    host = StoreHost(tmp_path / "store", ranks=2, heads=2, backend="mooncake")
    try:
        host.wait_until(lambda: host.store(0, 1).num_refused == 0)
        assert (host.load(0, 1).num_arrived, host.holds((0, 1), at=8)) == (2, True)
        clients = psutil.Process(host.process.pid).children(recursive=True)
        assert len(clients) == 3
        host.kill()
        host.wait_until(lambda: not host.process.is_serving)
        host.wait_until_it_serves()
        assert not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in clients)
        host.fill((2, 3), at=6)
        assert (host.load(0, 1).num_arrived, host.holds((0, 1), at=8)) == (2, True)
    finally:
        host.close()
        share.take_back_memory()


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
