"""MooncakePlane over TCP against another process: bytes, limits of a batch, and peers that die or stand still."""

import random
import subprocess
import sys
import time
from contextlib import closing
from threading import Thread

import msgspec
import numpy as np
import pytest

from fastdeploy_kvcache_v1.errors import CacheStateError, ConfigError, PeerRefusedError, RemoteReadError
from fastdeploy_kvcache_v1.transfer import mooncake_plane as module
from fastdeploy_kvcache_v1.transfer.mooncake_plane import MooncakePlane
from fastdeploy_kvcache_v1.transfer.mooncake_source import MooncakeSource
from fastdeploy_kvcache_v1.transfer.spans import Span, Spans
from tests.mooncake_master import needs_mooncake
from tests.transfer.peer import (
    BLOCK_BYTES,
    CANARY,
    HOST,
    NUM_BLOCKS,
    NUM_REGIONS,
    Peer,
    canaries,
    content,
    mooncake_plane,
    rows,
    soon,
)

pytestmark = [pytest.mark.process, needs_mooncake()]
ALL = Spans.of([Span(region, 0, 0, NUM_BLOCKS * BLOCK_BYTES) for region in range(NUM_REGIONS)])


class Ours:
    def __init__(self):
        self.plane = MooncakePlane(HOST)
        self.tensors = canaries()
        self.plane.register(rows(self.tensors))

    def refill(self):
        for tensor in self.tensors:
            tensor[:] = CANARY

    def is_untouched(self):
        return all((tensor == CANARY).all() for tensor in self.tensors)


@pytest.fixture(scope="module")
def ours():
    made = Ours()
    yield made
    made.plane.close()
    made.plane.close()


@pytest.fixture(autouse=True)
def _fresh(ours):
    ours.refill()


@pytest.fixture(scope="module")
def shared_peer():
    peer = Peer(mooncake_plane)
    yield peer
    peer.kill()


@pytest.fixture
def own_peer():
    peer = Peer(mooncake_plane, seed=3)
    yield peer
    peer.kill()


def test_a_read_fills_its_spans_and_touches_nothing_else(shared_peer, ours):
    rng = random.Random(0)
    theirs, expected = content(1), canaries()
    spans = [
        Span(region, source * BLOCK_BYTES + 8, target * BLOCK_BYTES + 24, rng.choice([1, 4096, BLOCK_BYTES - 24]))
        for region in range(NUM_REGIONS)
        for source, target in zip(rng.sample(range(NUM_BLOCKS), 20), rng.sample(range(NUM_BLOCKS), 20), strict=True)
    ]
    for span in spans:
        taken = theirs[span.region].reshape(-1)[span.source_offset : span.source_offset + span.num_bytes]
        expected[span.region].reshape(-1)[span.target_offset : span.target_offset + span.num_bytes] = taken
    with closing(ours.plane.open(shared_peer.address, soon())) as source:
        source.read("any", Spans.of(spans), soon())
        assert all(np.array_equal(got, want) for got, want in zip(ours.tensors, expected, strict=True))
        source.read("any", ALL, soon())
    assert all(np.array_equal(got, want) for got, want in zip(ours.tensors, theirs, strict=True))


def test_more_spans_than_a_batch_may_have_arrive_whole(shared_peer, ours):
    count = 2 * MooncakeSource.most_spans + 3
    spans = Spans.of([Span(0, at * 32, at * 32, 16) for at in range(count)])
    with closing(ours.plane.open(shared_peer.address, soon())) as source:
        source.read("any", spans, soon())
    got, want = (tensors[0].reshape(-1)[: count * 32].reshape(count, 32) for tensors in (ours.tensors, content(1)))
    assert np.array_equal(got[:, :16], want[:, :16])
    assert (got[:, 16:] == CANARY).all()


def test_spans_outside_of_either_side_read_nothing(shared_peer, ours):
    end = NUM_BLOCKS * BLOCK_BYTES
    with closing(ours.plane.open(shared_peer.address, soon())) as source:
        for span in (Span(0, 0, end, 1), Span(NUM_REGIONS, 0, 0, 1), Span(0, 0, -1, 1)):
            with pytest.raises(CacheStateError):
                source.read("any", Spans.of([span]), soon())
        with pytest.raises(RemoteReadError, match="source bytes outside"):
            source.read("any", Spans.of([Span(0, end, 0, 1)]), soon())
    assert ours.is_untouched()


def test_a_deadline_that_is_over_reads_nothing(shared_peer, ours):
    with closing(ours.plane.open(shared_peer.address, soon())) as source:
        with pytest.raises(RemoteReadError, match="in time"):
            source.read("any", ALL, time.monotonic() - 1)
        with pytest.raises(RemoteReadError, match="in time"):
            source.read("any", ALL, soon())
    assert ours.is_untouched()


def test_a_dead_peer_is_an_error_and_another_one_is_read(own_peer, shared_peer, ours):
    with closing(ours.plane.open(own_peer.address, soon())) as source:
        source.read("any", ALL, soon())
        own_peer.kill()
        with pytest.raises(RemoteReadError, match="failed"):
            source.read("any", ALL, soon())
    ours.refill()
    with closing(ours.plane.open(shared_peer.address, soon())) as source:
        source.read("any", ALL, soon())
    assert all(np.array_equal(got, want) for got, want in zip(ours.tensors, content(1), strict=True))


def test_no_byte_of_a_failed_read_arrives_when_the_peer_goes_on(own_peer, ours):
    """The engine itself goes on with a batch that it called failed: only dropping it ends that."""
    spans = Spans.of([Span(0, at * 4096, at * 4096, 4096) for at in range(NUM_BLOCKS * BLOCK_BYTES // 4096)])
    with closing(ours.plane.open(own_peer.address, soon())) as source:
        source.read("any", Spans.of([Span(0, 0, 0, 1)]), soon())
        own_peer.stop()
        with pytest.raises(RemoteReadError, match="failed"):
            source.read("any", spans, soon())
        ours.refill()
        own_peer.go_on()
        own_peer.ask("address")
        for _ in range(20):
            time.sleep(0.05)
            assert ours.is_untouched()


def test_a_cancelled_read_has_ended_when_close_returns(own_peer, ours):
    source = ours.plane.open(own_peer.address, soon())
    source.read("any", Spans.of([Span(0, 0, 0, 1)]), soon())
    own_peer.stop()
    failures = []

    def read():
        try:
            source.read("any", ALL, soon(60))
        except RemoteReadError as error:
            failures.append(error)

    thread = Thread(target=read)
    thread.start()
    while not source._lock.locked():
        time.sleep(0.001)
    source.close()
    ours.refill()
    own_peer.go_on()
    own_peer.ask("address")
    thread.join(20)
    assert len(failures) == 1
    assert ours.is_untouched()


def test_another_plane_and_another_protocol_are_refused(ours):
    for address in (b"\xc1", msgspec.msgpack.encode(["mooncake", "rdma", "127.0.0.1:1", []])):
        with pytest.raises(PeerRefusedError, match="not mooncake over tcp"):
            ours.plane.open(address, soon())


def test_what_cannot_work_is_refused_at_once(monkeypatch):
    with pytest.raises(ConfigError, match="choose one of tcp, rdma"):
        MooncakePlane(HOST, protocol="udp")
    monkeypatch.setattr(module.importlib.metadata, "version", lambda name: "0.3.11.post1")
    with pytest.raises(ConfigError, match=r"0\.3\.11\.post1 says"):
        MooncakePlane(HOST)
    monkeypatch.setattr(module, "PACKAGES", ("no-such-package", "none-either"))
    monkeypatch.undo()
    monkeypatch.setattr(module, "PACKAGES", ("no-such-package", "none-either"))
    with pytest.raises(ConfigError, match="needs a package"):
        MooncakePlane(HOST)


@pytest.mark.parametrize("version", ["0.3.12.post1", "0.3.13", "0.3.13.post1", "0.4.0", "1.0"])
def test_versions_that_tell_the_truth_are_taken(version):
    assert module._numbers(version) >= module.FIRST_VERSION


ENDING = """
import sys, threading, time
from tests.transfer.peer import canaries, rows, soon, HOST
from fastdeploy_kvcache_v1.transfer.mooncake_plane import MooncakePlane
from fastdeploy_kvcache_v1.transfer.spans import Span, Spans

plane = MooncakePlane(HOST)
tensors = canaries()
plane.register(rows(tensors))
source = plane.open(bytes.fromhex(sys.argv[1]), soon())
spans = Spans.of([Span(0, at * 4096, at * 4096, 4096) for at in range(64 * 16)])
source.read("any", spans, soon())

def read():
    while True:
        source.read("any", spans, soon())

threading.Thread(target=read, daemon=True).start()
time.sleep(0.2)
sys.exit(7)
"""


def test_a_process_that_ends_while_it_reads_neither_crashes_nor_hangs(shared_peer):
    done = subprocess.run(
        [sys.executable, "-c", ENDING, shared_peer.address.hex()], timeout=60, capture_output=True, text=True
    )
    assert done.returncode == 7, done.stderr
