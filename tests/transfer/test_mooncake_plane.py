"""MooncakePlane over Mooncake itself: the contract, and processes that die, stand still or end while they read."""

import time
from contextlib import closing, contextmanager

import msgspec
import pytest

from fastdeploy_kvcache_v1.errors import ConfigError, PeerRefusedError, RemoteReadError
from fastdeploy_kvcache_v1.transfer import mooncake_plane as module
from fastdeploy_kvcache_v1.transfer.mooncake_plane import MooncakePlane
from fastdeploy_kvcache_v1.transfer.mooncake_source import MooncakeSource
from fastdeploy_kvcache_v1.transfer.spans import Span, Spans
from fastdeploy_kvcache_v1.worker.ops import BlockRows
from tests.gpu.plane_contract import ONE_SIDED, everything, soon
from tests.mooncake_master import needs_mooncake
from tests.transfer.peer import ChildProcess, serve_mooncake
from tests.transfer.planes import HOST, Engine, Mooncake, Sockets

KIND = Mooncake


class Peer(ChildProcess):
    def __init__(self, seed):
        super().__init__(serve_mooncake, seed)
        self.address = self.hello

    def ask(self, name, *arguments):
        return self.kill() if name == "leave" else super().ask(name)

    def kill(self):
        if not self._connection.closed:
            super().kill()


class RealMooncake(Sockets):
    """Peers are processes."""

    limits = (MooncakeSource, "most_spans", "most_bytes")

    def make(self):
        return MooncakePlane(HOST)

    def peer(self):
        self._shared = self._shared or Peer(1)
        return self._shared

    @contextmanager
    def own_peer(self):
        peer = Peer(3)
        try:
            yield peer
        finally:
            peer.kill()

    def close(self):
        if self._shared is not None:
            self._shared.kill()


@pytest.fixture(scope="module")
def real():
    made = RealMooncake(None)
    yield made
    made.close()


@pytest.mark.process
@needs_mooncake()
@pytest.mark.parametrize("check", ONE_SIDED, ids=[check.__name__ for check in ONE_SIDED])
def test_the_contract_is_kept(real, check):
    check(real)


@pytest.mark.process
@needs_mooncake()
def test_no_byte_of_a_failed_read_arrives_when_the_peer_goes_on(real):
    """The engine itself goes on with a batch that it called failed: only dropping it ends that."""
    spans = Spans.of([Span(0, at * 4096, at * 4096, 4096) for at in range(500)])
    with real.own_peer() as peer, real.ours() as mine, closing(mine.open(peer)) as source:
        source.read("any", Spans.of([Span(0, 0, 0, 1)]), soon())
        peer.stop()
        with pytest.raises(RemoteReadError, match="failed"):
            source.read("any", spans, soon())
        mine.refill()
        peer.go_on()
        peer.ask("address")
        for _ in range(20):
            time.sleep(0.05)
            assert mine.is_untouched()


# ---- without Mooncake


def test_another_protocol_is_refused(world):
    kind, protocol, *rest = msgspec.msgpack.decode(world.peer().address)
    assert protocol == "tcp"
    with world.ours() as mine, pytest.raises(PeerRefusedError, match="not mooncake over tcp"):
        mine.plane.open(msgspec.msgpack.encode([kind, "rdma", *rest]), soon())


def test_each_source_has_an_engine_of_its_own_that_ends_with_it(world, monkeypatch):
    monkeypatch.setattr(module, "LARGEST_REGISTRATION", 1 << 20)
    with world.ours() as mine:
        serving = mine.plane._serving
        assert serving.started_as == (HOST, "P2PHANDSHAKE", "tcp", "")
        assert sum(size for _, size in serving.registered) == sum(rows.nbytes for rows in mine.tensors.read())
        assert max(size for _, size in serving.registered) == 1 << 20
        source = mine.open(world.peer())
        assert source._engine is not serving
        source.read("any", everything(), soon())
        source.close()
        assert source._engine is None


@pytest.mark.parametrize(
    ("refuses", "reason"), [("initialize", "cannot start over tcp"), ("register_memory", "cannot register")]
)
def test_an_engine_that_refuses_is_refused_in_words(world, monkeypatch, refuses, reason):
    monkeypatch.setattr(Engine, "refuses", refuses)
    with pytest.raises(ConfigError, match=reason), world.ours():
        pass


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        *((version, None) for version in ("0.3.12.post1", "0.3.13", "0.3.13.post1", "0.4.0", "1.0")),
        ("0.3.12", r"0\.3\.12 says that transfers are done before"),
        ("0.3.11.post1", r"0\.3\.11\.post1 says"),
    ],
)
def test_versions_that_tell_the_truth_are_taken(world, version, reason):
    world.version = version
    if reason is None:
        world.make().close()
        return
    with pytest.raises(ConfigError, match=reason):
        world.make()


def test_what_cannot_work_is_refused_at_once(world, monkeypatch):
    with pytest.raises(ConfigError, match="choose one of tcp, rdma"):
        MooncakePlane(HOST, protocol="udp")
    on_gpu = [BlockRows(4096, 1, 16, 16, on_gpu=True)]
    with closing(world.make()) as plane, pytest.raises(ConfigError, match="memory of the CPU only"):
        plane.register(on_gpu)
    with closing(MooncakePlane(HOST, protocol="rdma", device="mlx5_0")) as plane:
        plane.register(on_gpu)
        assert plane._serving.started_as[2:] == ("rdma", "mlx5_0")

    def not_there(name):
        raise ImportError(name)

    monkeypatch.setattr(module.importlib, "import_module", not_there)
    with pytest.raises(ConfigError, match="cannot be loaded"):
        world.make()
    monkeypatch.undo()
    monkeypatch.setattr(module, "PACKAGES", ("no-such-package", "none-either"))
    with pytest.raises(ConfigError, match="needs a package"):
        world.make()
