"""How the HTTP server treats open requests when it is told to stop."""

import asyncio
import logging
import signal
import socket
import threading

import httpx2
import pytest
from fastapi import FastAPI

from fastdeploy_kvcache_v1.lab.server import http_server


class Waiting:
    """An engine and its app, whose request is open until the engine refuses it."""

    def __init__(self):
        self.opened, self.answers = threading.Event(), []
        self.app = FastAPI()
        self.app.get("/")(self._wait)

    async def _wait(self) -> str:
        self._loop, self._refused = asyncio.get_running_loop(), asyncio.Event()
        self.opened.set()
        await self._refused.wait()
        return self._reason

    def refuse(self, reason):
        self._reason = reason
        self._loop.call_soon_threadsafe(self._refused.set)

    def ask(self, url):
        self.answers.append(httpx2.get(url, timeout=60).text)


@pytest.fixture
def waiting(monkeypatch):
    monkeypatch.setattr(http_server, "FORCE_S", 10)
    return Waiting()


def stop_with_an_open_request(waiting, num_signals):
    server = http_server.HttpServer()

    def client():
        asking = threading.Thread(target=waiting.ask, args=(f"http://127.0.0.1:{listener.getsockname()[1]}/",))
        asking.start()
        waiting.opened.wait()
        for _ in range(num_signals):
            server.handle_exit(signal.SIGINT, None)
        asking.join()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=client)
        thread.start()
        server.run_app(waiting.app, waiting, listener, "Ready")
        thread.join()
    return server


def test_open_request_is_refused_after_its_grace_and_the_log_says_so(waiting, monkeypatch, caplog):
    monkeypatch.setattr(http_server, "GRACE_S", 0)
    server = stop_with_an_open_request(waiting, 1)
    assert waiting.answers == ['"the server is shutting down"']
    (line,) = [each.message for each in caplog.records if each.levelno == logging.WARNING]
    assert line.startswith("stopping: open requests (1) end first, or get HTTP 503 after 0 s; a second signal")
    assert server.ends_at is not None


def test_second_signal_refuses_open_requests_before_their_grace_ends(waiting, monkeypatch):
    monkeypatch.setattr(http_server, "GRACE_S", 3600)
    stop_with_an_open_request(waiting, 2)
    assert waiting.answers == ['"the server is shutting down"']
