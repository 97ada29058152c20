"""Control links between two ends of this process: order, signs of life, and what a handshake refuses."""

import socket
import threading
import time
from contextlib import closing, suppress

import pytest

from fastdeploy_kvcache_v1.errors import PeerRefusedError
from fastdeploy_kvcache_v1.transfer import link_server
from fastdeploy_kvcache_v1.transfer.authentication import accept_peer, prove_to_peer
from fastdeploy_kvcache_v1.transfer.channel import Channel, connect
from fastdeploy_kvcache_v1.transfer.control_link import Inbox, LinkClosed, LinkOpened, Self, greet
from fastdeploy_kvcache_v1.transfer.link_server import LinkServer
from fastdeploy_kvcache_v1.transfer.messages import (
    Done,
    Hello,
    Offer,
    Ping,
    Progress,
    Refused,
    Welcome,
    Withdraw,
    encode,
)
from fastdeploy_kvcache_v1.transfer.settings import TransferSettings
from tests.gpu.plane_contract import soon
from tests.transfer.planes import HOST, SECRET
from tests.transfer.ranks import geometry


def me(name="prefill", *, model="m", **settings):
    given = {"secret": SECRET, "ping_s": 0.05, "instance": name, **settings}
    return Self(geometry(model=model), name.encode(), TransferSettings(**given))


def heard(inbox, last):
    """All that arrives but pings, as far as one for which `last` is true."""
    found = []
    while True:
        _, message = inbox.get(timeout=20)
        if isinstance(message, Ping) and not last(message):
            continue
        found.append(message)
        if last(message):
            return found


def is_a(kind):
    return lambda message: isinstance(message, kind)


@pytest.fixture
def serve(request):
    """Listens with some settings."""

    def make(**settings):
        inbox = Inbox()
        server = LinkServer(HOST, 0, me("decode", **settings), inbox)
        request.addfinalizer(server.close)
        return server, inbox

    return make


def stranger(port):
    """A connection that knows the secret, before its first message."""
    channel = connect(HOST, port, soon())
    prove_to_peer(channel, SECRET, b"control", soon())
    return channel


def test_messages_arrive_in_order_between_the_opening_and_the_end(serve):
    server, far_inbox = serve()
    inbox = Inbox()
    near = greet(HOST, server.port, me(), inbox)
    near.start()
    far, _ = far_inbox.get(timeout=20)
    assert (far.address, far.instance, near.address, near.instance) == (b"prefill", "prefill", b"", "decode")
    assert far.geometry == near.geometry == geometry()
    sent = [Offer("l", "r", [1, 2], 3), Progress("l", 1, 1), Withdraw("l", "aborted")]
    for message in sent:
        near.send(message)
    assert heard(far_inbox, is_a(Withdraw)) == sent
    far.send(Done("l"))
    far.want(("l", "m"))
    assert heard(inbox, lambda message: message == Ping(["l", "m"])) == [LinkOpened(), Done("l"), Ping(["l", "m"])]
    near.close("it is enough")
    near.close("twice")
    assert heard(inbox, is_a(LinkClosed)) == [LinkClosed("it is enough")]
    (end,) = heard(far_inbox, is_a(LinkClosed))
    assert "broke: the peer closed the connection" in end.reason
    far.close("")
    assert inbox.empty()


@pytest.mark.parametrize(
    ("says", "reason"),
    [(None, "sent no heartbeat for 0.2 s"), (b"\xc1", "a message of the peer cannot be read")],
    ids=["nothing", "garbage"],
)
def test_a_link_ends_with_a_peer_that_says_nothing_or_garbage(serve, says, reason):
    server, inbox = serve(silence_s=0.2)
    with closing(stranger(server.port)) as channel:
        channel.send_frame(encode(Hello(geometry(), b"", "x")), soon())
        assert channel.receive_frame(soon()) == encode(Welcome(geometry(), "decode"))
        if says is not None:
            channel.send_frame(says, soon())
        link, opened = inbox.get(timeout=20)
        (closed,) = heard(inbox, is_a(LinkClosed))
        assert opened == LinkOpened()
        assert reason in closed.reason
        link.close("")


def test_a_peer_that_reads_nothing_loses_its_link(serve):
    server, inbox = serve(silence_s=2.0)
    with closing(stranger(server.port)) as channel:
        channel.send_frame(encode(Hello(geometry(), b"", "x")), soon())
        link, _ = inbox.get(timeout=20)
        for number in range(20):
            link.send(Offer(str(number), "r", [number] * 900_000, 1))
        closed = None
        while not isinstance(closed, LinkClosed):
            with suppress(OSError):
                channel.send_frame(encode(Ping()), soon())
            closed = inbox.get(timeout=20)[1]
        assert "cannot be reached: the peer did not answer in time" in closed.reason
        link.close("")


def answering(answer):
    """A server of its own that knows the secret: its port."""
    listener = socket.create_server((HOST, 0))

    def run():
        with listener, closing(Channel(listener.accept()[0])) as channel:
            if answer is None:
                time.sleep(0.5)
                return
            accept_peer(channel, SECRET, b"control", soon())
            channel.receive_frame(soon())
            if answer:
                channel.send_frame(answer, soon())

    threading.Thread(target=run, daemon=True).start()
    return listener.getsockname()[1]


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (encode(Refused("go away")), PeerRefusedError, "refuses: go away"),
        (encode(Done("l")), PeerRefusedError, "answers with Done instead of Welcome"),
        (encode(Welcome(geometry(model="other"), "x")), PeerRefusedError, "the model is 'm' here and 'other' on the"),
        (b"\xc1", PeerRefusedError, "cannot be read"),
        (b"", ConnectionError, "the peer closed the connection"),
        (None, TimeoutError, "did not answer in time"),
    ],
    ids=["refused", "no welcome", "another model", "garbage", "closed", "silent"],
)
def test_what_a_decode_rank_may_answer_wrongly(answer, error, text):
    with pytest.raises(error, match=text):
        greet(HOST, answering(answer), me(handshake_s=0.2 if answer is None else 20.0), Inbox())


@pytest.mark.parametrize(
    ("ours", "text"),
    [
        (me(model="other"), "refuses: the model is 'm' here and 'other' on the peer"),
        (me(model="o" * 3000), "refuses: the model is 'm' here and 'ooo"),
        (me(secret=b"another secret of sixteen bytes"), "another shared secret"),
    ],
    ids=["model", "long model", "secret"],
)
def test_a_prefill_rank_that_does_not_fit_is_refused_with_the_reason(serve, ours, text):
    server, inbox = serve()
    with pytest.raises(PeerRefusedError, match=text):
        greet(HOST, server.port, ours, Inbox())
    server.close()
    assert server.num_refused == 1
    assert inbox.empty()


@pytest.mark.parametrize("first", [encode(Done("l")), b"\xc1"], ids=["no hello", "garbage"])
def test_a_connection_that_does_not_begin_with_hello_is_closed(serve, first):
    server, inbox = serve()
    with closing(stranger(server.port)) as channel:
        channel.send_frame(first, soon())
        with pytest.raises((EOFError, ConnectionError)):
            channel.receive_frame(soon())
    server.close()
    assert server.num_refused == 1
    assert inbox.empty()


def test_silent_connections_block_no_other_until_there_are_too_many(serve, monkeypatch):
    monkeypatch.setattr(link_server, "MAX_HANDSHAKES", 3)
    server, inbox = serve(handshake_s=30.0)
    silent = [socket.create_connection((HOST, server.port)) for _ in range(2)]
    near = greet(HOST, server.port, me(), Inbox())
    near.start()
    far, _ = inbox.get(timeout=20)
    silent.append(socket.create_connection((HOST, server.port)))
    for each in silent:
        assert len(each.recv(32, socket.MSG_WAITALL)) == 32
    with pytest.raises((PeerRefusedError, OSError)):
        greet(HOST, server.port, me(), Inbox())
    server.close()
    assert server.num_refused == 4, "one was too many, and closing ends the silent ones"
    near.close("")
    far.close("")
    for each in silent:
        each.close()
    with pytest.raises(ConnectionRefusedError):
        greet(HOST, server.port, me(), Inbox())
