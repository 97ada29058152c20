"""What one client, or one model directory, must not do to the clients of a real server."""

import http.client
import json
import re
import socket
import threading
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from fastdeploy_kvcache_v1.embedded.http.connections import RESERVED_DESCRIPTORS
from tests.e2e.server_process import OPERATOR, started, wait_until
from tests.model.model_dirs import BASE, byte_level_tokenizer, random_tensors, write_model

pytestmark = pytest.mark.process

SMALL = ("--block-size", "16", "--num-gpu-blocks-override", "64", "--swap-space", "0.01", "--max-model-len", "1000")
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a * b %}{% endfor %}{% endfor %}"
TEMPLATE = "{% if messages[0].content == 'loop' %}" + ENDLESS + "{% endif %}{{ messages[0].content }}"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    model = write_model(tmp_path_factory.mktemp("model") / "m", random_tensors(BASE), BASE)
    byte_level_tokenizer().save(str(model / "tokenizer.json"))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    flags = ("--model", str(model), "--block-size", "8", "--swap-space", "0.01")
    with started(tmp_path_factory.mktemp("server"), *flags) as running:
        yield running
        assert running.wait_idle()["ok"]
        assert running.stop() == 0, running.stderr
        assert "Traceback" not in running.stderr
        running.assert_nothing_left()


@contextmanager
def running_stream(server):
    """Entered, `count()` is the number of events since the last call, of one stream after the other."""
    events, stop = [0], threading.Event()

    def read():
        body = {"prompt": "go on", "max_tokens": 400, "ignore_eos": True, "stream": True}
        while not stop.is_set():
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
                assert response.status_code == 200
                for line in response.iter_lines():
                    events[0] += line.startswith("data: {")
                    if stop.is_set():
                        break

    def count():
        counted, events[0] = events[0], 0
        return counted

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield count
    finally:
        stop.set()
        thread.join()


def peak_memory(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmHWM:\s*(\d+) kB", status).group(1)) * 1024


def chat(server, content):
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)


def test_a_stream_goes_on_beside_a_template_without_end(server):
    assert chat(server, "hello").status_code == 200
    pid = server.intake.pid
    with running_stream(server) as count:
        wait_until(count, "the stream to go on")
        response = chat(server, "loop")
        assert count() > 10, "a second of a small model"
    assert response.status_code == 400
    assert "take more than 0.5 s of CPU time" in response.json()["error"]["message"]
    assert chat(server, "hello").status_code == 200
    assert server.intake.pid != pid


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", b'{"prompt": "x", "stop_token_ids": [' + b'"",' * 4_000_000 + b"1]}"),
        ("chat/completions", b'{"messages": [' + b'{"role": 1},' * 1_000_000 + b"1]}"),
        ("completions", b'{"prompt": "' + b"lorem ipsum " * 1_300_000 + b'"}'),
    ],
    ids=["stop_token_ids", "messages", "prompt"],
)
def test_a_stream_goes_on_beside_a_large_request_of_nothing_but_errors(server, path, body):
    headers = {"content-type": "application/json"}
    with running_stream(server) as count:
        wait_until(count, "the stream to go on")
        response = httpx.post(f"{server.url}/v1/{path}", content=body, headers=headers, timeout=120)
        wait_until(count, "the stream to go on")
    assert response.status_code == 400
    assert peak_memory(server.process.pid) < 2**30


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_beyond_the_limit_is_answered_while_it_is_sent(server, declared):
    """By a client that reads nothing before it has sent everything."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    chunks = [b"x" * 2**20] * 20
    headers = {"content-type": "application/json"} | ({"content-length": str(20 * 2**20)} if declared else {})
    connection.request("POST", "/v1/completions", iter(chunks), headers, encode_chunked=not declared)
    response = connection.getresponse()
    assert response.status == 413
    assert "--max-request-mib 16" in json.loads(response.read())["error"]["message"]
    connection.close()


def test_the_rest_of_a_refused_body_is_not_read_for_ever(server):
    host, port = server.url.removeprefix("http://").split(":")
    chunk = b"100000\r\n" + b"x" * 2**20 + b"\r\n"
    with socket.create_connection((host, int(port)), timeout=60) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        with pytest.raises(OSError, match=r"reset|Broken pipe"):
            client.sendall(chunk * 300)


def test_a_page_of_another_site_can_do_nothing(server):
    evil = {"host": "evil.example", **OPERATOR}
    for method, path, headers, status in (
        ("POST", "/reset_prefix_cache", {"content-type": "text/plain"}, 403),
        ("GET", "/debug/check", {}, 403),
        ("POST", "/reset_prefix_cache", evil, 403),
        ("GET", "/health", evil, 403),
        ("POST", "/v1/completions", {"content-type": "text/plain"}, 415),
    ):
        answer = httpx.request(method, f"{server.url}{path}", headers=headers, content=b"{}")
        assert (path, answer.status_code) == (path, status)


def test_more_connections_than_descriptors_are_refused_and_the_others_served(tmp_path):
    max_files = RESERVED_DESCRIPTORS + 40
    with started(tmp_path, *SMALL, max_files=max_files) as running:
        host, port = running.url.removeprefix("http://").split(":")
        idle = [socket.create_connection((host, int(port)), timeout=60) for _ in range(30)]
        assert httpx.get(f"{running.url}/health").status_code == 200
        idle += [socket.create_connection((host, int(port)), timeout=60) for _ in range(170)]
        refused = httpx.get(f"{running.url}/health")
        assert refused.status_code == 503
        assert "all 40 connections of this server are in use" in refused.json()["error"]["message"]
        for each in idle:
            each.close()
        wait_until(lambda: httpx.get(f"{running.url}/health").status_code == 200, "room for a connection")
        assert running.stop() == 0, running.stderr
        assert "Traceback" not in running.stderr
        assert running.stderr.count("\n") < 10
        running.assert_nothing_left()


def test_listening_for_others_is_said(tmp_path):
    with started(tmp_path, *SMALL, "--host", "0.0.0.0") as running:
        assert "listening on 0.0.0.0: the server has no password" in running.stderr
        assert httpx.get(f"{running.url}/health").status_code == 200
