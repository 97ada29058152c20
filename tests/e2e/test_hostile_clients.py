"""What one client, or one model directory, must not do to the clients of a real server."""

import threading
from contextlib import contextmanager

import httpx
import pytest

from tests.e2e.server_process import started, wait_until
from tests.model.model_dirs import BASE, byte_level_tokenizer, random_tensors, write_model

pytestmark = pytest.mark.process

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
