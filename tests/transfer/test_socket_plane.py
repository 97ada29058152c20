"""SocketPlane against another process: bytes, and refusals."""

import random
import socket
import struct
import threading
import time
from contextlib import closing, suppress
from functools import partial

import msgspec
import numpy as np
import pytest

from fastdeploy_kvcache_v1.errors import CacheStateError, ConfigError, PeerRefusedError, RemoteReadError
from fastdeploy_kvcache_v1.transfer import read_server
from fastdeploy_kvcache_v1.transfer.channel import MAX_FRAME_BYTES
from fastdeploy_kvcache_v1.transfer.read_protocol import MOST_BYTES, MOST_SPANS, ReadRequest
from fastdeploy_kvcache_v1.transfer.socket_plane import SocketPlane
from fastdeploy_kvcache_v1.transfer.spans import Span, Spans
from tests.fault_proxy import Fault, FaultProxy
from tests.transfer.peer import (
    BLOCK_BYTES,
    CANARY,
    HOST,
    NUM_BLOCKS,
    NUM_REGIONS,
    SECRET,
    Peer,
    canaries,
    content,
    rows,
    socket_plane,
    soon,
)
from tests.transfer.ranks import until
from tests.transfer.reader import EVERYTHING, THEIRS, Ours, fields_of, through, whole_blocks


@pytest.mark.process
@pytest.mark.parametrize("checksums", [False, True], ids=["plain", "checksums"])
@pytest.mark.parametrize("seed", range(4))
def test_a_read_fills_its_spans_and_touches_nothing_else(shared_peer, checksums, seed):
    rng = random.Random(seed)
    ours = Ours(checksums=checksums)
    sources, targets = rng.sample(EVERYTHING, 40), rng.sample(EVERYTHING, 40)
    spans = [
        Span(region, source * BLOCK_BYTES + at, target * BLOCK_BYTES + at, count)
        for region in range(NUM_REGIONS)
        for source, target in zip(sources, targets, strict=True)
        for at, count in [(rng.randrange(100), rng.choice([1, 7, 4096, BLOCK_BYTES - 100]))]
    ]
    with closing(ours.plane), closing(ours.open(shared_peer.address)) as source:
        source.read("all", Spans.of(spans), soon())
    expected = canaries()
    for span in spans:
        place = slice(span.target_offset, span.target_offset + span.num_bytes)
        taken = slice(span.source_offset, span.source_offset + span.num_bytes)
        expected[span.region].reshape(-1)[place] = THEIRS[span.region].reshape(-1)[taken]
    assert all(np.array_equal(got, want) for got, want in zip(ours.tensors, expected, strict=True))


@pytest.mark.process
def test_a_read_of_more_than_one_request_arrives_whole(shared_peer, ours):
    """By bytes as by spans: both limits of a request are passed."""
    small = [Span(0, at * 16, at * 16, 16) for at in range(3 * MOST_SPANS)]
    large = [Span(region, 0, 0, NUM_BLOCKS * BLOCK_BYTES) for region in range(NUM_REGIONS)] * 3
    assert Spans.of(large).num_bytes > MOST_BYTES
    with closing(ours.open(shared_peer.address)) as source:
        source.read("all", Spans.of(small), soon())
        assert np.array_equal(ours.tensors[0].reshape(-1)[: 48 * MOST_SPANS], THEIRS[0].reshape(-1)[: 48 * MOST_SPANS])
        assert (ours.tensors[0].reshape(-1)[48 * MOST_SPANS :] == CANARY).all()
        source.read("all", Spans.of(large), soon())
    assert all(np.array_equal(got, want) for got, want in zip(ours.tensors, THEIRS, strict=True))


@pytest.mark.process
def test_an_empty_read_is_done_at_once(shared_peer, ours):
    with closing(ours.open(shared_peer.address)) as source:
        source.read("all", Spans.of([]), soon())
    assert ours.is_untouched()


@pytest.mark.process
def test_only_blocks_of_an_open_lease_are_readable(shared_peer, ours):
    shared_peer.ask("grant", "some", [3, 4, 9])
    allowed = whole_blocks([3, 4, 9], [0, 1, 2]), Spans.of([Span(0, 3 * BLOCK_BYTES, 0, 2 * BLOCK_BYTES)])
    refused = [
        ("some", whole_blocks([5], [0])),
        ("some", Spans.of([Span(0, 4 * BLOCK_BYTES, 0, BLOCK_BYTES + 1)])),
        ("some", Spans.of([Span(0, 3 * BLOCK_BYTES - 1, 0, 2)])),
        ("some", Spans.of([Span(0, 3 * BLOCK_BYTES, 0, 7 * BLOCK_BYTES)])),
        ("unknown", whole_blocks([3], [0])),
    ]
    for spans in allowed:
        with closing(ours.open(shared_peer.address)) as source:
            source.read("some", spans, soon())
    for tensor in ours.tensors:
        tensor[:] = CANARY
    for lease, spans in refused:
        with closing(ours.open(shared_peer.address)) as source:
            with pytest.raises(RemoteReadError, match="not open over these blocks"):
                source.read(lease, spans, soon())
            with pytest.raises(RemoteReadError):
                source.read("all", whole_blocks([0], [0]), soon())
    assert ours.is_untouched()
    shared_peer.ask("revoke", "some")
    shared_peer.ask("revoke", "some")
    with closing(ours.open(shared_peer.address)) as source, pytest.raises(RemoteReadError, match="not open"):
        source.read("some", whole_blocks([3], [0]), soon())
    assert ours.is_untouched()


@pytest.mark.process
@pytest.mark.parametrize(
    "span",
    [
        (NUM_REGIONS, 0, 1),
        (-1, 0, 1),
        (0, -1, 1),
        (0, 0, 0),
        (0, 0, -5),
        (0, NUM_BLOCKS * BLOCK_BYTES, 1),
        (0, 1, NUM_BLOCKS * BLOCK_BYTES),
        (0, 2**63 - 1, 1),
        (0, 1, 2**63 - 1),
    ],
)
def test_a_request_outside_of_the_tensors_is_refused(shared_peer, ours, span):
    """As a peer that does not check anything itself would send it."""
    with closing(ours.open(shared_peer.address)) as source:
        request = ReadRequest("all", False, struct.pack("<3q", *span))
        source._channel.send_frame(msgspec.msgpack.encode(request), soon())
        refusal_bytes, num_bytes = struct.unpack("<IQ", source._channel.receive_bytes(12, soon()))
        assert refusal_bytes > 0
        assert num_bytes == 0


@pytest.mark.process
@pytest.mark.parametrize(
    "garbage",
    [b"", b"\x00", b"\xc1" * 40, msgspec.msgpack.encode(["all", True, b"\0" * 23]), msgspec.msgpack.encode([1, 2])],
)
def test_garbage_is_refused_and_others_are_served(shared_peer, ours, garbage):
    before = shared_peer.ask("num_refused")
    with closing(ours.open(shared_peer.address)) as source:
        source._channel.send_frame(garbage, soon())
        assert struct.unpack("<IQ", source._channel.receive_bytes(12, soon()))[0] > 0
    with closing(ours.open(shared_peer.address)) as source:
        source.read("all", whole_blocks([0], [0]), soon())
    until(lambda: shared_peer.ask("num_refused") > before)  # counted after the answer was sent


@pytest.mark.process
def test_a_frame_that_is_too_large_is_refused_before_it_is_read(shared_peer, ours):
    with closing(ours.open(shared_peer.address)) as source:
        source._channel.send([struct.pack("<I", MAX_FRAME_BYTES + 1)], soon())
        with pytest.raises((EOFError, ConnectionError)):
            source._channel.receive_bytes(1, soon())


@pytest.mark.process
def test_another_secret_is_refused_on_both_sides(shared_peer):
    other = SocketPlane(HOST, b"another secret of sixteen bytes")
    other.register(rows(canaries()))
    with closing(other), pytest.raises(PeerRefusedError, match="another shared secret"):
        other.open(shared_peer.address, soon())


def test_a_server_that_does_not_know_the_secret_is_refused(ours):
    """It accepts everybody, and answers with what it can make up."""
    with socket.create_server((HOST, 0)) as listener:

        def pretend():
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"n" * 32)
                connection.recv(64)
                connection.sendall(b"p" * 32)
                connection.recv(1)

        thread = threading.Thread(target=pretend)
        thread.start()
        address = msgspec.msgpack.encode(["socket", HOST, listener.getsockname()[1], b"0" * 16])
        with pytest.raises(PeerRefusedError, match="does not know the shared secret"):
            ours.open(address)
        thread.join()


@pytest.mark.process
def test_nothing_is_readable_without_the_secret(shared_peer):
    """The request follows a proof that is wrong; not one byte of a block comes back."""
    _, host, port, _ = fields_of(shared_peer.address)
    with socket.create_connection((host, port)) as connection:
        connection.settimeout(20)
        assert len(connection.recv(32, socket.MSG_WAITALL)) == 32
        frame = msgspec.msgpack.encode(ReadRequest("all", False, struct.pack("<3q", 0, 0, 100)))
        connection.sendall(b"x" * 64 + struct.pack("<I", len(frame)) + frame)
        with suppress(ConnectionError):
            assert connection.recv(1) == b""


def test_an_address_of_another_plane_is_refused(ours):
    for address in (b"", b"\xc1", msgspec.msgpack.encode(["mooncake", HOST, 1, b""])):
        with pytest.raises(PeerRefusedError, match="another data plane"):
            ours.open(address)


def test_a_peer_that_is_not_there_or_does_not_speak_is_an_error_by_the_deadline(ours):
    with socket.create_server((HOST, 0)) as silent:
        port = silent.getsockname()[1]
        address = msgspec.msgpack.encode(["socket", HOST, port, b"0" * 16])
        with pytest.raises(RemoteReadError, match="did not finish the handshake"):
            ours.plane.open(address, time.monotonic() + 0.2)
    with pytest.raises(RemoteReadError, match="cannot connect"):
        ours.open(address)


@pytest.mark.process
def test_a_peer_that_restarted_behind_the_same_port_is_another_one(own_peer, ours):
    port = fields_of(own_peer.address)[2]
    source = ours.open(own_peer.address)
    own_peer.kill()
    restarted = Peer(partial(socket_plane, port), seed=2)
    try:
        restarted.ask("grant", "all", EVERYTHING)
        with closing(source), pytest.raises(RemoteReadError):
            source.read("all", whole_blocks([0], [0]), soon())
        with pytest.raises(PeerRefusedError, match="restarted"):
            ours.open(own_peer.address)
        assert ours.is_untouched()
        with closing(ours.open(restarted.address)) as source:
            source.read("all", whole_blocks([0], [0]), soon())
        assert np.array_equal(ours.tensors[0][0], content(2)[0][0])
    finally:
        restarted.kill()


@pytest.mark.process
def test_a_flipped_bit_is_found(shared_peer, ours):
    proxy = FaultProxy(fields_of(shared_peer.address)[2])
    with closing(proxy), closing(ours.open(through(proxy, shared_peer.address))) as source:
        source.read("all", whole_blocks([0, 1], [0, 1]), soon())
        proxy.fault = Fault.FLIP
        with pytest.raises(RemoteReadError, match="checksum"):
            source.read("all", whole_blocks([0, 1], [2, 3], regions=[0]), soon())
        assert proxy.faults_met > 0


@pytest.mark.process
def test_a_reset_connection_is_an_error(shared_peer, ours):
    proxy = FaultProxy(fields_of(shared_peer.address)[2])
    with closing(proxy), closing(ours.open(through(proxy, shared_peer.address))) as source:
        proxy.fault = Fault.RESET
        with pytest.raises(RemoteReadError):
            source.read("all", whole_blocks([0], [0]), soon())


def test_close_ends_every_connection_and_every_thread(ours):
    other = Ours()
    ours.plane.grant("all", EVERYTHING)
    before = threading.active_count()
    sources = [other.open(ours.plane.address()) for _ in range(3)]
    sources[0].read("all", whole_blocks([0], [0]), soon())
    assert threading.active_count() == before + 3
    ours.plane.close()
    assert threading.active_count() == before - 1
    for source in sources:
        with pytest.raises(RemoteReadError):
            source.read("all", whole_blocks([0], [0]), soon())
        source.close()
        source.close()
    other.plane.close()


def test_more_connections_than_allowed_are_closed_at_once(monkeypatch):
    monkeypatch.setattr(read_server, "MAX_CONNECTIONS", 2)
    ours, other = Ours(), Ours()
    with closing(ours.plane), closing(other.plane):
        sources = [other.open(ours.plane.address()) for _ in range(2)]
        with pytest.raises((RemoteReadError, PeerRefusedError)):
            other.open(ours.plane.address())
        assert ours.plane.num_refused == 1
        for source in sources:
            source.close()


def test_what_cannot_work_is_refused_at_once(ours):
    with pytest.raises(ConfigError, match="every address"):
        SocketPlane("0.0.0.0", SECRET)
    with pytest.raises(ConfigError, match="at least 16"):
        SocketPlane(HOST, b"short")
    with pytest.raises(CacheStateError, match="registered already"):
        ours.plane.register(rows(canaries()))
    with closing(SocketPlane(HOST, SECRET)) as plane, pytest.raises(ConfigError, match="cannot listen"):
        SocketPlane(HOST, SECRET, port=fields_of(plane.address())[2])


@pytest.mark.process
def test_own_spans_outside_of_the_tensors_are_a_bug_and_send_nothing(shared_peer, ours):
    with closing(ours.open(shared_peer.address)) as source:
        for span in (Span(NUM_REGIONS, 0, 0, 1), Span(0, 0, NUM_BLOCKS * BLOCK_BYTES, 1), Span(0, 0, -1, 1)):
            with pytest.raises(CacheStateError):
                source.read("all", Spans.of([span]), soon())
        source.read("all", whole_blocks([0], [0]), soon())
