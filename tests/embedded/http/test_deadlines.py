"""Deadlines of connections, over real sockets."""

import asyncio
import contextlib
import socket
import threading
import time

import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.embedded.http import deadlines as http_protocol
from fastdeploy_kvcache_v1.embedded.http.connections import BoundedListener
from fastdeploy_kvcache_v1.embedded.http.server import HttpServer
from fastdeploy_kvcache_v1.embedded.settings import ServerConfig

CONFIG = ServerConfig(None, "tiny", 264, "127.0.0.1", 0, 200, 8, 64, KVCacheConfig(8), "float32", 0, "warning")
SHORT_S = 0.1


class StubEngine:
    def refuse(self, reason):
        pass


class App:
    def __init__(self):
        self.fast = FastAPI()
        self.stream_ended = threading.Event()
        self.fast.get("/endless")(self.endless)

    async def endless(self) -> StreamingResponse:
        async def chunks():
            try:
                while True:
                    yield b"x" * 65536
                    await asyncio.sleep(0.001)
            finally:
                self.stream_ended.set()

        return StreamingResponse(chunks())


@pytest.fixture
def app():
    return App()


@pytest.fixture
def connect(app):
    clients = []
    with BoundedListener() as listener:
        listener.bind(("127.0.0.1", 0))
        server = HttpServer(app.fast, CONFIG, StubEngine(), stop_requested=lambda: False)
        address = listener.getsockname()
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()

        def make():
            clients.append(socket.create_connection(address, timeout=30))
            return clients[-1]

        while not server.started:
            time.sleep(0.01)
        yield make
        for client in clients:
            client.close()
        server.stop()
        thread.join()


@pytest.fixture
def short_headers(monkeypatch):
    monkeypatch.setattr(http_protocol, "HEADER_TIMEOUT_S", SHORT_S)


def everything(client):
    data = b""
    while chunk := client.recv(65536):
        data += chunk
    return data


@pytest.mark.parametrize("sent", [b"", b"GET /endless HTTP/1.1\r\nhost: localhost\r\n"])
def test_headers_that_do_not_come_are_answered_with_408(connect, short_headers, sent):
    client = connect()
    client.sendall(sent)
    text = everything(client)
    assert text.startswith(b"HTTP/1.1 408 ")
    assert b"the headers of the request did not arrive within 0.1 s" in text


def test_a_client_that_does_not_read_is_cut_off(connect, app, monkeypatch):
    monkeypatch.setattr(http_protocol, "STALL_TIMEOUT_S", SHORT_S)
    reader, stalled = connect(), connect()
    for client in (reader, stalled):
        client.sendall(b"GET /endless HTTP/1.1\r\nhost: localhost\r\n\r\n")
    read = 0
    while not app.stream_ended.is_set():
        read += len(reader.recv(65536))
    with contextlib.suppress(ConnectionResetError):
        everything(stalled)
    assert read
    assert reader.recv(10), "who reads goes on"
