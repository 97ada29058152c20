"""SocketPlane beyond the contract of all planes: secrets, leases, what is not the protocol, reads that are cut off."""

import socket
import struct
import threading
import time
from contextlib import closing, suppress

import msgspec
import pytest

from fastdeploy_kvcache_v1.errors import ConfigError, PeerRefusedError, RemoteReadError
from fastdeploy_kvcache_v1.transfer import read_server
from fastdeploy_kvcache_v1.transfer.read_protocol import MOST_BYTES, MOST_SPANS, ReadRequest
from fastdeploy_kvcache_v1.transfer.socket_plane import SocketPlane
from fastdeploy_kvcache_v1.transfer.spans import Span, Spans
from fastdeploy_kvcache_v1.worker.ops import BlockRows
from tests.fault_proxy import Fault, FaultProxy
from tests.gpu.plane_contract import CANARY, NUM_BLOCKS, WIDTHS, Tensors, content, everything, soon, whole_blocks
from tests.transfer.planes import HOST, SECRET, Sockets, Theirs

KIND = Sockets
WIDTH = WIDTHS[0]


@pytest.fixture
def peer(world):
    return world.peer()


@pytest.fixture
def proxy(peer):
    made = FaultProxy(fields_of(peer.address)[2])
    yield made
    made.close()


def fields_of(address):
    return msgspec.msgpack.decode(address)


def through(mine, proxy, peer):
    """A source that reaches the peer through a proxy."""
    kind, host, _, plane = fields_of(peer.address)
    address = msgspec.msgpack.encode([kind, host, int(proxy.address.rpartition(":")[2]), plane])
    return mine.plane.open(address, soon())


def one(*span):
    return Spans.of([Span(*span)])


# ---- leases


@pytest.mark.parametrize(
    ("lease", "spans", "is_open"),
    [
        ("some", whole_blocks([3, 4, 9], [0, 1, 2]), True),
        ("some", one(0, 3 * WIDTH, 0, 2 * WIDTH), True),
        ("some", whole_blocks([5], [0]), False),
        ("some", one(0, 4 * WIDTH, 0, WIDTH + 1), False),
        ("some", one(0, 3 * WIDTH - 1, 0, 2), False),
        ("some", one(0, 3 * WIDTH, 0, 7 * WIDTH), False),
        ("unknown", whole_blocks([3], [0]), False),
        ("ended", whole_blocks([3], [0]), False),
    ],
)
def test_only_blocks_of_an_open_lease_are_readable(mine, peer, lease, spans, is_open):
    for name in ("some", "ended"):
        peer.plane.grant(name, [3, 4, 9])
    peer.plane.revoke("ended")
    peer.plane.revoke("ended")
    with closing(mine.open(peer)) as source:
        if is_open:
            source.read(lease, spans, soon())
            return
        with pytest.raises(RemoteReadError, match="not open over these blocks"):
            source.read(lease, spans, soon())
        with pytest.raises(RemoteReadError, match="not open over these blocks"):
            source.read("all", whole_blocks([0], [0]), soon())
    assert mine.is_untouched()
    peer.plane.close()  # its thread counts behind the refusal
    assert peer.plane.num_refused == 1


@pytest.mark.parametrize(("event", "reason"), [("revoke", "the lease ended while"), ("overwrite", "checksum mismatch")])
def test_lease_that_changes_before_the_end_of_its_bytes_fails_the_read(mine, peer, monkeypatch, event, reason):
    of_buffers = read_server.checksum_of

    def checksum_of(buffers):
        if event == "revoke":
            peer.plane.revoke("all")
        else:
            peer.tensors.arrays[0][:] = 1
        return of_buffers(buffers)

    monkeypatch.setattr(read_server, "checksum_of", checksum_of)
    with closing(mine.open(peer)) as source, pytest.raises(RemoteReadError, match=reason):
        source.read("all", whole_blocks([3], [0]), soon())


# ---- what is not the protocol


def request(*span, count=1, lease="all"):
    return msgspec.msgpack.encode(ReadRequest(lease, False, struct.pack("<3q", *span) * count))


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        *((request(region, 0, 1), "names blocks that do not exist") for region in (len(WIDTHS), -1)),
        *((request(0, first, 1), "names blocks that do not exist") for first in (-1, NUM_BLOCKS * WIDTH, 2**63 - 1)),
        *((request(0, 0, count), "names blocks that do not exist") for count in (0, -5)),
        *((request(0, 1, count), "names blocks that do not exist") for count in (NUM_BLOCKS * WIDTH, 2**63 - 1)),
        (request(0, 0, 1, count=0), "0 spans, 1 to 1024 are allowed"),
        (request(0, 0, 1, count=MOST_SPANS + 1), "1025 spans"),
        (request(0, 0, WIDTH, count=MOST_BYTES // WIDTH + 1), f"{MOST_BYTES} are allowed"),
        (request(0, 0, 1, lease="l" * 3000), "not open"),
        *((frame, "cannot be read") for frame in (b"", b"\x00", b"\xc1" * 40)),
        *((msgspec.msgpack.encode(each), "cannot be read") for each in (["all", True, b"\0" * 23], [1, 2])),
    ],
)
def test_what_is_no_request_is_refused_in_words_and_others_are_served(mine, peer, frame, reason):
    """As a peer that does not check anything itself would send it."""
    with closing(mine.open(peer)) as source:
        channel = source._channel
        channel.send_frame(frame, soon())
        refusal_bytes, num_bytes = struct.unpack("<IQ", channel.receive_bytes(12, soon()))
        assert 0 < refusal_bytes <= 1000
        assert num_bytes == 0
        text = channel.receive_bytes(refusal_bytes, soon()).decode()
        assert reason in text or (len(frame) > 3000 and len(text) == 1000)
        with pytest.raises((EOFError, ConnectionError)):
            channel.receive_bytes(1, soon())
    with closing(mine.open(peer)) as source:
        source.read("all", whole_blocks([0], [0]), soon())


# ---- secrets


def pretending(answers):
    """The address of a server that accepts everybody, and says what it can make up."""
    listener = socket.create_server((HOST, 0))

    def pretend():
        with listener, listener.accept()[0] as connection:
            for answer in answers:
                connection.sendall(answer)
                connection.recv(64)

    threading.Thread(target=pretend, daemon=True).start()
    return msgspec.msgpack.encode(["socket", HOST, listener.getsockname()[1], b"0" * 16])


@pytest.mark.parametrize(
    ("answers", "error", "reason"),
    [
        ((b"n" * 32, b"p" * 32), PeerRefusedError, "does not know the shared secret"),
        ((b"n" * 32,), PeerRefusedError, "has another shared secret, or it restarted"),
        ((b"n" * 31,), RemoteReadError, "did not finish the handshake"),
    ],
)
def test_a_server_that_does_not_know_the_secret_is_refused(mine, answers, error, reason):
    with pytest.raises(error, match=reason):
        mine.plane.open(pretending(answers), time.monotonic() + (0.2 if error is RemoteReadError else 20.0))


def test_nothing_is_readable_without_the_secret(peer):
    """The request follows a proof that is wrong; not one byte of a block comes back."""
    _, host, port, _ = fields_of(peer.address)
    with socket.create_connection((host, port)) as connection:
        connection.settimeout(20)
        assert len(connection.recv(32, socket.MSG_WAITALL)) == 32
        frame = request(0, 0, 100)
        connection.sendall(b"x" * 64 + struct.pack("<I", len(frame)) + frame)
        with suppress(ConnectionError):
            assert connection.recv(1) == b""


def test_a_peer_that_restarted_behind_the_same_port_is_another_one(mine, world):
    with world.own_peer() as first:
        source = mine.open(first)
    restarted = Theirs(SocketPlane(HOST, SECRET, port=fields_of(first.address)[2]), Tensors(content(2)))
    with closing(restarted.plane), closing(mine.open(restarted)) as other:
        with closing(source), pytest.raises(RemoteReadError):
            source.read("all", whole_blocks([0], [0]), soon())
        with pytest.raises(PeerRefusedError, match="restarted"):
            mine.open(first)
        assert mine.is_untouched()
        other.read("all", whole_blocks([0], [0]), soon())
        assert (mine.tensors.read()[0][0] == content(2)[0][0]).all()


# ---- reads that are cut off


@pytest.mark.parametrize(("fault", "reason"), [(Fault.FLIP, "checksum"), (Fault.RESET, "failed")])
def test_what_the_network_does_to_bytes_is_an_error(mine, peer, proxy, fault, reason):
    with closing(through(mine, proxy, peer)) as source:
        source.read("all", whole_blocks([0, 1], [0, 1]), soon())
        proxy.fault = fault
        with pytest.raises(RemoteReadError, match=reason):
            source.read("all", one(0, 0, 2 * WIDTH, 2 * WIDTH), soon())
        assert proxy.faults_met > 0


@pytest.mark.parametrize("event", ["cancel", "death", "silence"])
def test_no_byte_arrives_after_a_read_ended(mine, peer, proxy, event):
    """It is cut off when a part of it is there. The slots are given out again: canaries of the next owner stay."""
    source, failures = through(mine, proxy, peer), []

    def read():
        deadline = soon() if event != "silence" else time.monotonic() + 0.3
        try:
            source.read("all", everything(), deadline)
        except RemoteReadError as error:
            failures.append(str(error))

    proxy.fault = Fault.SLOW
    thread = threading.Thread(target=read)
    thread.start()
    while not (mine.tensors.arrays[0] != CANARY).any():
        time.sleep(0.001)
    proxy.fault = Fault.HANG
    if event == "cancel":
        source.close()
    elif event == "death":
        peer.plane.close()
        proxy.fault = Fault.NONE
    thread.join(20)
    assert len(failures) == 1
    assert event != "silence" or "in time" in failures[0]
    mine.refill()
    proxy.fault = Fault.NONE
    with pytest.raises(RemoteReadError):
        source.read("all", whole_blocks([0], [0]), soon())
    source.close()
    if event != "death":
        with closing(mine.open(peer)) as other:  # all that was under way has passed by now
            other.read("all", one(0, 0, 0, WIDTH), soon())
        mine.tensors.arrays[0][0] = CANARY
    assert mine.is_untouched()


def test_close_ends_every_connection_and_every_thread(mine, peer):
    before = threading.active_count()
    sources = [mine.open(peer) for _ in range(3)]
    sources[0].read("all", whole_blocks([0], [0]), soon())
    assert threading.active_count() == before + 3
    peer.plane.close()
    assert threading.active_count() == before - 1
    for source in sources:
        with pytest.raises(RemoteReadError):
            source.read("all", whole_blocks([0], [0]), soon())
        source.close()


def test_more_connections_than_allowed_are_closed_at_once(monkeypatch, world, mine):
    monkeypatch.setattr(read_server, "MAX_CONNECTIONS", 2)
    with world.own_peer() as peer:
        sources = [mine.open(peer) for _ in range(2)]
        with pytest.raises((RemoteReadError, PeerRefusedError)):
            mine.open(peer)
        assert peer.plane.num_refused == 1
        for source in sources:
            source.close()


def test_what_cannot_work_is_refused_at_once(mine):
    for error, text, host, secret, port in (
        (ConfigError, "every address", "0.0.0.0", SECRET, 0),
        (ConfigError, "every address", "", SECRET, 0),
        (ConfigError, "at least 16", HOST, b"fifteen bytes..", 0),
        (ConfigError, "cannot listen", HOST, SECRET, fields_of(mine.plane.address())[2]),
    ):
        with pytest.raises(error, match=text):
            SocketPlane(host, secret, port=port)
    with closing(SocketPlane(HOST, SECRET)) as plane, pytest.raises(ConfigError, match="memory of the CPU only"):
        plane.register([BlockRows(4096, 1, 16, 16, on_gpu=True)])
