"""A real server and the official client: streams, bad input, disconnects, signals, and the worker's death."""

import json
import signal
import threading

import httpx2
import openai
import psutil
import pytest

from fastdeploy_kvcache_v1.lab.server import http_server
from fastdeploy_kvcache_v1.lab.server.worker import client as worker_client
from tests.e2e.server_process import ServerProcess, started, wait_until

pytestmark = pytest.mark.process

SMALL = ("--block-size", "16", "--num-gpu-blocks-override", "64", "--swap-space", "0.01", "--max-model-len", "2000")
ENDLESS = {"max_tokens": 900, "temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with started(tmp_path_factory.mktemp("server"), *SMALL) as running:
        yield running
        assert running.wait_idle()["ok"]
        assert running.stop() == 0, running.stderr
        running.assert_nothing_left()


@pytest.fixture
def client(server):
    with server.client() as openai_client:
        yield openai_client


def test_ready_line_is_one_line_with_a_request_to_paste(server):
    line = server.stdout
    assert line.count("\n") == 1
    assert f"{server.url}/v1/completions" in line
    assert "random model" in line
    body = json.loads(line.rstrip()[line.index("-d '") + 4 : -1])
    assert [name for name in server.metrics() if name.startswith("copy_path")], "also before the first request"
    cached = []
    for _ in range(2):
        answer = httpx2.post(f"{server.url}/v1/completions", json=body, timeout=60.0).json()
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == 0
    assert cached[1] >= 64


@pytest.mark.smoke
def test_streams_and_plain_answers_agree(client):
    options = {"model": "random-tiny", "max_tokens": 12, "temperature": 0.7, "seed": 11}
    plain = client.completions.create(prompt="tell me", **options)
    stream = list(
        client.completions.create(prompt="tell me", stream=True, stream_options={"include_usage": True}, **options)
    )
    assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == plain.choices[0].text
    assert stream[-1].usage.completion_tokens == plain.usage.completion_tokens
    messages = [{"role": "user", "content": "tell me"}]
    chat = client.chat.completions.create(messages=messages, **options)
    chunks = client.chat.completions.create(messages=messages, stream=True, **options)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == chat.choices[0].message.content


@pytest.mark.smoke
def test_errors_have_the_types_of_the_client(client):
    with pytest.raises(openai.BadRequestError, match="prompt: must not be empty"):
        client.completions.create(model="random-tiny", prompt="")
    with pytest.raises(openai.BadRequestError, match="too long for --max-model-len 2000"):
        client.completions.create(model="random-tiny", prompt="x" * 3000)
    with pytest.raises(openai.BadRequestError, match="do not fit the device tier's 64 blocks of 16 tokens"):
        client.completions.create(model="random-tiny", prompt="x" * 1000, max_tokens=100)
    with pytest.raises(openai.NotFoundError, match="model 'other' does not exist"):
        client.models.retrieve("other")


@pytest.mark.smoke
@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_aborts_the_request_and_frees_its_blocks(server, stream):
    aborted = server.metrics()["requests_ended_total{outcome=aborted}"]
    body = {"prompt": "go on", "max_tokens": 900, "ignore_eos": True, "stream": stream}
    if stream:
        with httpx2.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60.0) as response:
            next(response.iter_lines())
    else:
        with pytest.raises(httpx2.ReadTimeout):
            httpx2.post(f"{server.url}/v1/completions", json=body, timeout=0.3)
    report = server.wait_idle()
    assert report["ok"]
    assert server.metrics()["requests_ended_total{outcome=aborted}"] == aborted + 1


def test_a_stream_goes_on_beside_a_long_text(server):
    """A thread tokenizes it, which gives the interpreter lock away. The stream's events are counted meanwhile."""
    events, ends = [0], threading.Event()

    def follow():
        body = {"prompt": "go on", "max_tokens": 900, "ignore_eos": True, "stream": True}
        while not ends.is_set():
            with httpx2.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
                for line in response.iter_lines():
                    events[0] += line.startswith("data: {")
                    if ends.is_set():
                        break

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        wait_until(lambda: events[0] > 0, "the stream")
        before = events[0]
        refused = httpx2.post(f"{server.url}/v1/completions", json={"prompt": "lorem ipsum " * 400_000}, timeout=120)
        assert events[0] - before > 20, "a second of a small model"
    finally:
        ends.set()
        thread.join()
    assert refused.status_code == 400
    assert "too long for --max-model-len 2000" in refused.json()["error"]["message"]


def why_cut(stream):
    """The error that ended the stream; None when it reached its end."""
    try:
        list(stream)
    except openai.APIError as error:
        return error.message
    return None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_while_streaming_answers_and_leaves_nothing(tmp_path, number):
    with started(tmp_path, *SMALL) as running, running.client() as client:
        stream = client.completions.create(model="random-tiny", prompt="go on", stream=True, **ENDLESS)
        next(iter(stream))
        assert running.stop(number) == 0, running.stderr
        assert why_cut(stream) in (None, "the server is shutting down"), "it ends in time, or is told why not"
        running.assert_nothing_left()
        assert "Traceback" not in running.stderr


def test_second_signal_ends_a_server_in_order(tmp_path):
    with started(tmp_path, *SMALL) as running, running.client() as client:
        stream = client.completions.create(model="random-tiny", prompt="go on", stream=True, **ENDLESS)
        next(iter(stream))
        running.process.send_signal(signal.SIGINT)
        wait_until(lambda: "a second signal refuses them" in running.stderr, "the first signal")
        assert running.stop(signal.SIGINT) == 0, running.stderr
        assert why_cut(stream) == "the server is shutting down"
        assert "Traceback" not in running.stderr
        assert "killing it" not in running.stderr


def test_signal_while_starting_leaves_nothing(tmp_path):
    server = ServerProcess(tmp_path)
    try:
        wait_until(lambda: psutil.Process(server.process.pid).children() != [], "the start of the worker")
        assert server.stop() == 0, server.stderr
        server.assert_nothing_left()
        assert server.stdout == ""
        assert "Traceback" not in server.stderr
    finally:
        server.kill()


@pytest.mark.smoke
def test_killed_worker_fails_requests_with_a_reason_and_ends_the_server(tmp_path):
    with started(tmp_path, *SMALL) as running, running.client() as client:
        worker = running.worker
        stream = client.completions.create(model="random-tiny", prompt="go on", stream=True, **ENDLESS)
        next(iter(stream))
        failures = []

        def ask():
            with pytest.raises(openai.InternalServerError) as caught:
                client.completions.create(model="random-tiny", prompt="and on", **ENDLESS)
            failures.append(caught.value)

        plain = threading.Thread(target=ask)
        plain.start()
        wait_until(lambda: running.check()["running"] == 2, "both requests to run")
        worker.kill()
        with pytest.raises(openai.APIError, match=rf"the worker process {worker.pid} was killed by SIGKILL"):
            list(stream)
        plain.join()
        assert failures[0].status_code == 503
        assert "was killed by SIGKILL" in str(failures[0])
        health = httpx2.get(f"{running.url}/health")
        assert health.status_code == 503
        assert "was killed by SIGKILL" in health.json()["error"]["message"]
        assert running.wait_exit() == 1
        running.assert_nothing_left()


def test_a_stopped_worker_does_not_keep_its_server(tmp_path):
    """SIGTERM must end it before a supervisor's patience does: 10 s for docker stop."""
    with started(tmp_path, *SMALL) as running, running.client() as client:
        stream = client.completions.create(model="random-tiny", prompt="go on", stream=True, **ENDLESS)
        next(iter(stream))
        running.worker.suspend()
        assert running.stop() == 0, running.stderr
        assert why_cut(stream) == "the server is shutting down"
        assert "did not end in time: killing it" in running.stderr
        running.assert_nothing_left()


@pytest.mark.smoke
def test_the_times_of_an_ordered_end_add_up_to_eight_seconds():
    assert http_server.FORCE_S + worker_client.STOP_TIMEOUT_S <= 8


def test_the_worker_dies_with_its_server(tmp_path):
    with started(tmp_path, *SMALL) as running:
        worker = running.worker
        running.process.kill()
        wait_until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, "its end")
        assert running.wait_exit() == -signal.SIGKILL
        assert list(running.temp_dir.iterdir()) == []


def test_taken_port_is_one_line_before_anything_starts(server, tmp_path):
    port = server.url.rsplit(":", 1)[1]
    second = ServerProcess(tmp_path, "--port", port)
    try:
        assert second.wait_exit() == 2
        assert (
            second.stderr == f"fastdeploy-kvcache: error: cannot listen on 127.0.0.1:{port}: Address already in use\n"
        )
        second.assert_nothing_left()
    finally:
        second.kill()
