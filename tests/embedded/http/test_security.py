"""What a web page, a slow client and a crowd must not be able to do: one test for each limit of the server."""

import asyncio
import logging
import resource
import socket

import pytest
from fastapi import Depends, FastAPI, Request
from fastapi.testclient import TestClient
from starlette.requests import Request as BodyRequest

from fastdeploy_kvcache_v1.embedded.api_error import ApiError
from fastdeploy_kvcache_v1.embedded.http import connections, linger, request_bodies
from fastdeploy_kvcache_v1.embedded.http.access import (
    OPERATOR_HEADER,
    HostCheck,
    listens_beyond_this_machine,
    require_json,
    require_operator,
)
from fastdeploy_kvcache_v1.embedded.http.connections import BoundedListener, connection_limit
from fastdeploy_kvcache_v1.embedded.http.errors import install_error_handlers
from fastdeploy_kvcache_v1.embedded.http.linger import Linger
from fastdeploy_kvcache_v1.embedded.http.request_bodies import BODIES_IN_ALL, FREE_BYTES, MIB, BodyRoom

CHUNK = 1000


# ---- web pages


def client_of(host="127.0.0.1", allowed_hosts=()):
    app = FastAPI()
    app.add_middleware(HostCheck, host=host, allowed_hosts=allowed_hosts)
    install_error_handlers(app)

    @app.post("/json")
    async def json_only(request: Request) -> str:
        require_json(request)
        return "ok"

    @app.get("/operator", dependencies=[Depends(require_operator)])
    async def operator() -> str:
        return "ok"

    return TestClient(app, "http://localhost")


@pytest.mark.parametrize(
    ("status", "hosts"),
    [
        (404, ["127.0.0.1:8000", "LOCALHOST", "localhost.", "kv.localhost", "[::1]:8000", "10.0.0.1", "kv.lan:1"]),
        (403, ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "evil.example:80:80", ""]),
        (403, ["evil.example#127.0.0.1", "127.0.0.1@evil.example", "0x7f.1.evil", "evillocalhost"]),
    ],
)
def test_only_addresses_localhost_and_given_names_are_this_server(status, hosts):
    client = client_of(allowed_hosts=("kv.lan",))
    for host in hosts:
        assert client.get("/nothing", headers={"host": host}).status_code == status, host
    assert client_of(allowed_hosts=("*",)).get("/nothing", headers={"host": "evil.example"}).status_code == 404


def test_the_refusal_says_what_to_do():
    error = client_of().get("/nothing", headers={"host": "evil.example"}).json()["error"]
    fault = "the Host header names 'evil.example', which is not this server"
    assert error["message"] == f"{fault}: start it with --allowed-hosts to add the name"


@pytest.mark.parametrize(
    ("status", "content_types"),
    [
        (200, ["application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json", "application/json;"]),
        (415, ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonp", "text/json"]),
        (415, ["text/plain; application/json", "text/plain, application/json", "text/plain;a=application/json"]),
    ],
)
def test_what_a_page_can_send_without_being_asked_is_not_json(status, content_types):
    client = client_of()
    for content_type in content_types:
        response = client.post("/json", content=b"{}", headers={"content-type": content_type})
        assert response.status_code == status, content_type
    assert client.post("/json", content=b"{}").status_code == 415


def test_operators_say_that_they_mean_it():
    client = client_of()
    assert client.get("/operator", headers={OPERATOR_HEADER: "1"}).status_code == 200
    response = client.get("/operator")
    assert response.status_code == 403
    assert response.json()["error"]["message"].endswith("send the header X-KVCache-Operator: 1")


def test_addresses_that_others_reach():
    assert not any(map(listens_beyond_this_machine, ["127.0.0.1", "127.9.9.9", "::1"]))
    assert all(map(listens_beyond_this_machine, ["0.0.0.0", "::", "fe80::1%eth0"]))


# ---- connections and descriptors


@pytest.fixture
def listener():
    with BoundedListener() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(100)
        sock.setblocking(False)
        sock.max_connections = 2
        yield sock


def connect(listener):
    return socket.create_connection(listener.getsockname(), timeout=30)


def everything(client):
    data = b""
    while chunk := client.recv(65536):
        data += chunk
    return data


def test_one_connection_too_many_is_answered_with_503(listener, caplog):
    clients = [connect(listener) for _ in range(4)]
    clients[2].sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    accepted = [listener.accept()[0] for _ in range(2)]
    with pytest.raises(BlockingIOError):
        listener.accept()
    for refused in clients[2:]:
        text = everything(refused)
        assert text.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert b"all 2 connections of this server are in use: try again later" in text
    assert listener.num_open == 2
    assert len(caplog.records) == 1, "said once, not for every connection"
    for sock in (*clients, *accepted, *accepted):
        sock.close()
    assert listener.num_open == 0, "a connection that is closed twice is one"


@pytest.mark.parametrize(
    ("soft", "hard", "limit", "new_soft"),
    [
        (1024, 4096, 512, 1024),
        (256, 4096, 512, 576),
        (128, 128, 64, 128),
        (70, 70, 16, 70),
        (256, resource.RLIM_INFINITY, 512, 576),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 512, resource.RLIM_INFINITY),
    ],
)
def test_the_limit_fits_the_descriptors_that_can_be_had(monkeypatch, caplog, soft, hard, limit, new_soft):
    limits = [soft, hard]
    monkeypatch.setattr(connections.resource, "getrlimit", lambda kind: tuple(limits))
    monkeypatch.setattr(connections.resource, "setrlimit", lambda kind, values: limits.__setitem__(slice(2), values))
    with caplog.at_level(logging.WARNING):
        assert connection_limit(512) == limit
    assert limits[0] == new_soft
    assert len(caplog.records) == (limit < 512)


# ---- bodies


def lingering(num_chunks, *, reads=0, headers=((b"transfer-encoding", b"chunked"),), ends=True):
    """What is sent, in order with what is received."""
    log = []
    left = [*([True] * num_chunks), *([False] if ends else [])]

    async def receive():
        if not left:
            await asyncio.Event().wait()
        log.append("receive")
        return {"type": "http.request", "body": b"x" * CHUNK, "more_body": left.pop(0)}

    async def send(message):
        names = [name for name, _ in message.get("headers", ())]
        log.append((message["type"].rpartition(".")[2], message.get("more_body", False), b"connection" in names))

    async def app(scope, receive, send):
        for _ in range(reads):
            await receive()
        await send({"type": "http.response.start", "status": 413, "headers": []})
        await send({"type": "http.response.body", "body": b"no"})

    asyncio.run(Linger(app)({"type": "http", "headers": list(headers)}, receive, send))
    return log


def test_the_answer_goes_out_first_and_the_rest_of_the_body_is_discarded():
    assert lingering(3) == [("start", False, True), ("body", True, False), *["receive"] * 4, ("body", False, False)]


def test_the_rest_of_a_body_is_bounded_in_bytes(monkeypatch):
    monkeypatch.setattr(linger, "MAX_BYTES", 5 * CHUNK)
    assert lingering(100).count("receive") == 5


class Client:
    """Sends what it is told to, and then waits."""

    def __init__(self, *sizes, declared=None, ends=True):
        self._messages = [{"type": "http.request", "body": b"x" * size, "more_body": True} for size in sizes]
        if ends:
            self._messages.append({"type": "http.request", "body": b"", "more_body": False})
        self.received = 0
        headers = [] if declared is None else [(b"content-length", str(declared).encode())]
        self.request = BodyRequest({"type": "http", "method": "POST", "path": "/", "headers": headers}, self._receive)

    async def _receive(self):
        if not self._messages:
            await asyncio.Event().wait()
        self.received += 1
        return self._messages.pop(0)


async def size_of(room, client):
    async with room.body(client.request) as body:
        return len(body)


def run(room, *clients):
    async def all_of_them():
        return await asyncio.gather(*(size_of(room, client) for client in clients), return_exceptions=True)

    return asyncio.run(all_of_them())


def status(answer):
    return answer.status if isinstance(answer, ApiError) else answer


def test_a_body_may_have_the_limit_and_no_byte_more():
    room = BodyRoom(1)
    assert [status(each) for each in run(room, Client(MIB), Client(MIB, 1))] == [MIB, 413]
    assert room.held == 0


def test_bodies_together_have_a_bound_and_short_ones_are_always_received():
    room = BodyRoom(1)
    large = [MIB // 2, MIB // 2]

    async def crowd():
        waiting = [asyncio.ensure_future(size_of(room, Client(*large, ends=False))) for _ in range(BODIES_IN_ALL)]
        await asyncio.sleep(0)
        while room.held < BODIES_IN_ALL * (MIB - FREE_BYTES):
            await asyncio.sleep(0)
        answers = await asyncio.gather(
            size_of(room, Client(MIB)), size_of(room, Client(FREE_BYTES)), return_exceptions=True
        )
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        return answers

    refused, short = asyncio.run(crowd())
    assert (status(refused), short) == (503, FREE_BYTES)
    assert room.held == 0, "a client that went away gives back what its body held"
    assert run(room, Client(MIB)) == [MIB]


def test_a_body_that_does_not_come_is_given_up(monkeypatch):
    monkeypatch.setattr(request_bodies, "BODY_TIMEOUT_S", 0.05)
    room = BodyRoom(1)
    (answer,) = run(room, Client(100, ends=False))
    assert status(answer) == 408
    assert room.held == 0
