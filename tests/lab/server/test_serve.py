"""What a signal does outside uvicorn's own loop."""

import json
import os
import shlex
import signal
import socket
from dataclasses import replace
from types import SimpleNamespace

import pytest
from fastapi import FastAPI

from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.lab.server import serve
from fastdeploy_kvcache_v1.lab.server.http_server import HttpServer, ready_line
from fastdeploy_kvcache_v1.lab.server.serve import _warn_of_open_address
from fastdeploy_kvcache_v1.lab.server.settings import ServerConfig
from fastdeploy_kvcache_v1.lab.server.text import load_tokenizer
from fastdeploy_kvcache_v1.lab.server.worker.client import StartInterruptedError

CONFIG = ServerConfig(cache=KVCacheConfig(8))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_before_listening_ends_the_server_without_ready_line(monkeypatch, capsys, number):
    """Handlers are those of before afterwards."""
    before, refusals = signal.getsignal(number), []

    def make_worker(config, *, namespace, stop_requested):
        assert not stop_requested()
        for _ in range(2):
            os.kill(os.getpid(), number)
        assert stop_requested()
        raise StartInterruptedError

    monkeypatch.setattr(serve, "ProcessWorkerClient", make_worker)
    assert serve.serve(replace(CONFIG, port=0), load_tokenizer(None)) == 0
    assert signal.getsignal(number) is before
    http = HttpServer()
    http.stop()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        http.run_app(FastAPI(), SimpleNamespace(refuse=refusals.append), listener, "ready")
    assert capsys.readouterr().out == ""
    assert refusals == []


@pytest.mark.parametrize(
    ("chats", "path", "field"), [(True, "chat/completions", "messages"), (False, "completions", "prompt")]
)
def test_the_ready_line_shows_what_the_model_is_made_for(chats, path, field):
    line = ready_line(CONFIG, ("0.0.0.0", 8123), chats=chats)
    assert "\n" not in line
    command = shlex.split(line[line.index("curl ") :])
    assert command[1] == f"http://127.0.0.1:8123/v1/{path}"
    assert field in json.loads(command[-1])


@pytest.mark.parametrize(
    ("address", "num_warnings"), [("127.0.0.1", 0), ("127.9.9.9", 0), ("::1", 0), ("0.0.0.0", 1), ("fe80::1%eth0", 1)]
)
def test_an_address_that_other_machines_reach_is_warned_of(caplog, address, num_warnings):
    _warn_of_open_address(SimpleNamespace(getsockname=lambda: (address, 8000)))
    assert len(caplog.records) == num_warnings
    assert all(f"listening on {address}: the server has no password" in text for text in caplog.messages)
