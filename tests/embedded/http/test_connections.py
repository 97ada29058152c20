"""Connections and descriptors are bounded, and who is refused is told."""

import errno
import logging
import resource
import socket

import pytest

from fastdeploy_kvcache_v1.embedded.http import connections
from fastdeploy_kvcache_v1.embedded.http.connections import BoundedListener, connection_limit


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


def answer(client):
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
        text = answer(refused)
        assert text.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert b"all 2 connections of this server are in use: try again later" in text
    assert listener.num_open == 2
    assert len(caplog.records) == 1, "said once, not for every connection"
    for sock in (*clients, *accepted):
        sock.close()


def test_a_closed_connection_makes_room_once(listener):
    clients = [connect(listener) for _ in range(3)]
    first, second = (listener.accept()[0] for _ in range(2))
    first.close()
    first.close()
    assert listener.num_open == 1
    third = listener.accept()[0]
    assert listener.num_open == 2
    for sock in (*clients, second, third):
        sock.close()
    assert listener.num_open == 0


def test_without_descriptors_waiting_connections_are_dropped_and_logged_once(listener, monkeypatch, caplog):
    clients = [connect(listener) for _ in range(3)]
    accept = socket.socket.accept
    spared = []

    def scarce(self):
        if self._spare is not None:
            raise OSError(errno.EMFILE, "Too many open files")
        spared.append(1)
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", scarce)
    with pytest.raises(BlockingIOError):
        listener.accept()
    assert [answer(client) for client in clients] == [b""] * 3
    assert len(spared) == 4, "three were dropped, then the queue was empty"
    assert [record.getMessage() for record in caplog.records] == [
        "no file descriptor is left for a new connection: raise ulimit -n"
    ]
    assert listener.num_open == 0
    for client in clients:
        client.close()


def test_other_errors_of_accept_are_its_callers(listener, monkeypatch):
    def broken(self):
        raise OSError(errno.EINVAL, "broken")

    monkeypatch.setattr(socket.socket, "accept", broken)
    with pytest.raises(OSError, match="broken"):
        listener.accept()


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
