"""What a signal does outside uvicorn's own loop."""

import json
import os
import shlex
import signal
import socket

import pytest
from fastapi import FastAPI

from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.embedded.http_server import HttpServer, ready_line
from fastdeploy_kvcache_v1.embedded.serve import NotedSignals, _warn_of_open_address
from fastdeploy_kvcache_v1.embedded.settings import ServerConfig


@pytest.mark.parametrize("number", NotedSignals.NUMBERS)
def test_signals_are_noted_and_raise_nothing(number):
    before = signal.getsignal(number)
    with NotedSignals() as signals:
        assert not signals.noted()
        for _ in range(2):
            os.kill(os.getpid(), number)
        assert signals.noted()
    assert signal.getsignal(number) is before


class StubEngine:
    def __init__(self):
        self.refusals = []

    def refuse(self, reason):
        self.refusals.append(reason)


@pytest.fixture
def server_config():
    return ServerConfig(cache=KVCacheConfig(8))


def test_signal_before_the_server_took_over_ends_it_without_a_ready_line(server_config, capsys):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        engine = StubEngine()
        HttpServer(FastAPI(), server_config, engine, stop_requested=lambda: True).run(sockets=[listener])
    assert capsys.readouterr().out == ""
    assert engine.refusals == []


@pytest.mark.parametrize(
    ("chats", "path", "field"), [(True, "chat/completions", "messages"), (False, "completions", "prompt")]
)
def test_the_ready_line_shows_what_the_model_is_made_for(server_config, chats, path, field):
    line = ready_line(server_config, ("0.0.0.0", 8123), chats=chats)
    assert "\n" not in line
    command = shlex.split(line[line.index("curl ") :])
    assert command[1] == f"http://127.0.0.1:8123/v1/{path}"
    assert field in json.loads(command[-1])


class Listener:
    def __init__(self, address):
        self._address = address

    def getsockname(self):
        return (self._address, 8000)


@pytest.mark.parametrize(
    ("address", "num_warnings"), [("127.0.0.1", 0), ("127.9.9.9", 0), ("::1", 0), ("0.0.0.0", 1), ("fe80::1%eth0", 1)]
)
def test_an_address_that_other_machines_reach_is_warned_of(caplog, address, num_warnings):
    _warn_of_open_address(Listener(address))
    assert len(caplog.records) == num_warnings
    assert all(f"listening on {address}: the server has no password" in text for text in caplog.messages)
