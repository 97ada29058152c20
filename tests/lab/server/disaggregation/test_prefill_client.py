"""The client of prefill servers against servers that answer well, badly, late, or never."""

import contextlib
import queue
import socket
import threading

import pytest

from fastdeploy_kvcache_v1.lab.model.sampler import SamplingParams
from fastdeploy_kvcache_v1.lab.server.disaggregation.prefill_client import PrefillClient
from fastdeploy_kvcache_v1.lab.server.prefill_job import PrefillAnswer, PrefillJob
from fastdeploy_kvcache_v1.transfer.settings import TransferSettings

OK = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
ANSWER = b'{"answer":{"token":7,"cached_tokens":3}}\n'


def chunk(data):
    return b"%x\r\n%s\r\n" % (len(data), data)


class Server:
    """Says `said` to each connection, and then nothing more; `closed` is set when the client has gone."""

    def __init__(self, said, *, closes=False):
        self._said, self._closes = said, closes
        self.request = b""
        self.asked = threading.Event()
        self.closed = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        with self._listener:
            connection, _ = self._listener.accept()
        with connection, contextlib.suppress(OSError):
            while b"sampling" not in self.request:
                self.request += connection.recv(65536)
            self.asked.set()
            connection.sendall(self._said)
            if self._closes:
                return
            while connection.recv(65536):
                pass
        self.closed.set()


@pytest.fixture
def client(request):
    """`client.answers` has what arrives. The parameter: how long a server may be silent."""
    silence_s = getattr(request, "param", 10.0)
    made = PrefillClient(TransferSettings(secret=b"sixteen bytes or more", ping_s=0.01, silence_s=silence_s))
    made.answers = queue.SimpleQueue()
    made.start(lambda *answer: made.answers.put(answer))
    yield made
    made.close()


def ask(client, url, name="r"):
    client.ask(url, PrefillJob(name, [1, 2, 3], SamplingParams(), "127.0.0.1", 9))


def answer(client):
    return client.answers.get(timeout=30)


def test_an_answer_comes_after_signs_of_life(client):
    server = Server(OK + chunk(b"{}\n") + chunk(b"{}\n" + ANSWER[:10]) + chunk(ANSWER[10:]))
    ask(client, server.url)
    assert answer(client) == ("r", PrefillAnswer(7, 3))
    assert b"POST /kvcache/prefill" in server.request
    assert b"x-kvcache-proof" in server.request.lower()


@pytest.mark.parametrize(
    ("said", "closes", "error"),
    [
        (OK + chunk(b"{}\n"), True, "cannot be asked"),
        (OK + chunk(b"{}\n") + b"0\r\n\r\n", False, "ended its answer too early"),
        (OK + chunk(b'{"error":"no room"}\n'), False, "no room"),
        (OK + chunk(b"[]\n"), False, "cannot be asked"),
        (b"HTTP/1.1 409 Conflict\r\ncontent-length: 5\r\n\r\nknown", False, "HTTP 409: known"),
        (b"not http", True, "cannot be asked"),
    ],
)
def test_whatever_else_a_server_says_is_an_error_in_one_line(client, said, closes, error):
    ask(client, Server(said, closes=closes).url)
    name, found = answer(client)
    assert name == "r"
    assert error in found
    assert "\n" not in found


@pytest.mark.parametrize("client", [0.05], indirect=True)
@pytest.mark.parametrize("said", [b"", OK + chunk(b"{}\n")])
def test_a_server_that_falls_silent_has_failed(client, said):
    ask(client, Server(said).url)
    assert "gave no sign for too long" in answer(client)[1]


def test_a_server_that_is_not_there_is_an_error(client):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    ask(client, f"http://127.0.0.1:{port}")
    assert "cannot be asked" in answer(client)[1]
    ask(client, "nonsense")
    assert "cannot be asked" in answer(client)[1]


def test_a_dropped_request_closes_its_connection_and_has_no_answer(client):
    server, other = Server(OK + chunk(b"{}\n")), Server(OK + chunk(ANSWER))
    ask(client, server.url)
    assert server.asked.wait(30)
    client.drop("r")
    client.drop("unknown")
    assert server.closed.wait(30)
    ask(client, other.url, "other")
    assert answer(client)[0] == "other"
    assert client.answers.empty()


def test_a_client_that_closes_drops_everything(client):
    server = Server(OK + chunk(b"{}\n"))
    ask(client, server.url)
    assert server.asked.wait(30)
    client.close()
    assert server.closed.wait(30)
    ask(client, server.url)
    assert client.answers.empty()
