"""The intake process and its end in the server: limits end it, and it leaves nothing behind."""

import asyncio
import json
import signal

import psutil
import pytest

from fastdeploy_kvcache_v1.embedded.api_error import ApiError
from fastdeploy_kvcache_v1.embedded.intake import client as intake_client
from fastdeploy_kvcache_v1.embedded.intake.client import IntakeClient
from fastdeploy_kvcache_v1.embedded.intake.intake import Endpoint, IntakeConfig, Options, Reading
from fastdeploy_kvcache_v1.embedded.intake.process import (
    ERROR,
    pack_error,
    pack_reading,
    unpack_error,
    unpack_reading,
)
from tests.e2e.server_process import wait_until
from tests.model.model_dirs import byte_level_tokenizer

pytestmark = pytest.mark.process

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a * b %}{% endfor %}{% endfor %}"
TEMPLATE = (
    "{% if messages[0].content == 'loop' %}" + ENDLESS + "{% endif %}"
    "{% if messages[0].content == 'memory' %}{% set x = 'a' * (messages | length * 3000000000) %}{% endif %}"
    "{% if messages[0].content == 'work' %}"
    "{% for a in range(10) %}{% for b in range(99999) %}{% set c = a * b %}{% endfor %}{% endfor %}"
    "{% endif %}"
    "{% macro again() %}{{ again() }}{% endmacro %}"
    "{% if messages[0].content == 'recursion' %}{{ again() }}{% endif %}"
    "{% if messages[0].content == 'flood' %}"
    "{% for a in range(50000) %}{{ 'a' * (messages | length * 1000) }}{% endfor %}"
    "{% endif %}"
    "{% if messages[0].content == 'half' %}{{ raise_exception('\\ud800') }}{% endif %}"
    "{{ messages[0].content }}"
)


def model_dir(path, template):
    path.mkdir()
    byte_level_tokenizer().save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(template)
    return path


def config_of(path):
    return IntakeConfig(path, "m", 264, 4096, 4096, 4, 16.0)


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    started = IntakeClient(config_of(model_dir(tmp_path_factory.mktemp("model") / "m", TEMPLATE)))
    started.wait_ready()
    yield started
    started.close()


def chat(client, content, *, size=0):
    raw = json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 3}).encode()
    return asyncio.run(client.read(Endpoint.CHAT, raw.ljust(size)))


def refusal(client, content):
    with pytest.raises(ApiError) as caught:
        chat(client, content)
    return caught.value


def test_what_crosses_the_connection_arrives_unchanged():
    options = Options(
        max_tokens=3,
        temperature=0.5,
        top_p=None,
        top_k=0,
        min_p=0.1,
        seed=2**63 - 1,
        stops=("a", "\ud800"),
        stop_token_ids=(1, 10**30),
        min_tokens=2,
        ignore_eos=True,
        stream=False,
        include_usage=True,
        continuous_usage=False,
        return_token_ids=False,
    )
    reading = Reading((0, 2**31 - 1, 5), options)
    assert unpack_reading(pack_reading(reading)) == reading
    error = ApiError(404, "x" * 2000, "model", "model_not_found")
    again = unpack_error(pack_error(error))
    assert (again.status, again.body) == (404, error.body)
    assert pack_error(error).kind == ERROR


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("recursion", "maximum recursion depth exceeded"),
        ("memory", "MemoryError"),
        ("half", "rejects these messages: ?"),
    ],
)
def test_a_template_that_fails_is_one_line_and_the_process_goes_on(client, content, message):
    pid = client.pid
    error = refusal(client, content)
    assert error.status == 400
    assert message in error.body["error"]["message"]
    error.body["error"]["message"].encode()
    assert chat(client, "hello").token_ids
    assert client.pid == pid


def test_a_template_without_end_is_ended_and_the_next_chat_served(client):
    pid = client.pid
    error = refusal(client, "loop")
    assert error.status == 400
    assert "take more than 0.5 s of CPU time" in error.body["error"]["message"]
    assert chat(client, "hello").token_ids
    assert client.pid != pid
    assert not psutil.pid_exists(pid)


def test_a_process_that_ended_between_two_requests_is_replaced(client):
    process = psutil.Process(client.pid)
    process.kill()
    wait_until(lambda: process.status() == psutil.STATUS_ZOMBIE, "its end")
    assert chat(client, "hello").token_ids
    assert client.pid != process.pid


def test_a_process_that_does_not_answer_is_killed(client, monkeypatch):
    """Stopped, it uses no CPU time."""
    monkeypatch.setattr(intake_client, "BASE_WALL_S", -3.9)
    process = psutil.Process(client.pid)
    process.suspend()
    assert "the intake process does not answer" in refusal(client, "hello").body["error"]["message"]
    assert not process.is_running()
    monkeypatch.undo()
    assert chat(client, "hello").token_ids


def test_close_ends_a_process_that_is_busy(tmp_path):
    client = IntakeClient(config_of(model_dir(tmp_path / "m", ENDLESS)))
    client.wait_ready()
    process = client._process

    async def ask():
        reading = asyncio.ensure_future(client.read(Endpoint.CHAT, b'{"messages": [{"role": "user", "content": ""}]}'))
        await asyncio.sleep(0.2)
        client.close()
        return await asyncio.gather(reading, return_exceptions=True)

    (answer,) = asyncio.run(ask())
    assert isinstance(answer, ApiError)
    assert answer.status == 503
    assert process.returncode == -signal.SIGKILL, "it did not wait for the limit of CPU time"
    client.close()
