"""What a user can do to a running server: streams, aborts, pause, sleep, new weights, all while the cache is in use."""

import contextlib
import json
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx2
import openai
import pytest

from fastdeploy_kvcache_v1.lab.model.directory import write_seed
from fastdeploy_kvcache_v1.telemetry.trace_recorder import VARIABLE

from . import cpu_server
from .cpu_server import started, wait_until
from .fastdeploy_trees import RELEASES
from .server_workload import NUM_DOCUMENTS, document

pytestmark = [pytest.mark.process, pytest.mark.fastdeploy, pytest.mark.timeout(600)]

FLAGS = ("--num-gpu-blocks-override", "24", "--swap-space", "0.02", "--write-policy", "write_through")
SECRET = "ada@example.org"
HOLD = Path(__file__).parent / "held_worker"
STEPS = 50
"""That the worker computes before a control request comes: enough to say something, few for an end."""
HEARD = re.compile("Start to run control method|Receive abort_reqs")
ENDLESS = {"max_tokens": 440, "extra_body": {"min_tokens": 440}}


@pytest.fixture(scope="module")
def server(release, tmp_path_factory):
    directory = tmp_path_factory.mktemp("server")
    environment = {
        "FD_ENABLE_REQUEST_DISCONNECT_STOP_INFERENCE": "1",
        "PYTHONPATH": str(HOLD),
        "KVCACHE_TEST_STEPS": str(directory / "steps"),
    }
    trace = directory / "trace.jsonl"
    if release == RELEASES[0]:
        environment[VARIABLE], flags = str(trace), FLAGS
    else:  # `serve` makes a variable of its flag
        flags = (*FLAGS, "--record-trace", str(trace))
    with started(release, directory, *flags, environment=environment) as (running, _):
        yield running


@pytest.fixture
def ask(client):
    return partial(cpu_server.ask, client)


def assert_all_blocks_come_back(server):
    def is_idle():
        metrics = server.metrics()
        return metrics["device_free_blocks"] + metrics["device_evictable_blocks"] == 24

    wait_until(is_idle, "all device blocks to be free or evictable")


def test_requests_are_recorded_with_their_session(server, ask):
    """That a replay of such a trace hits what the server hit: `engine/test_traced_requests.py`."""
    before = server.metrics()["trace_lines_total"]
    named = [
        {"extra_headers": {"X-Session-ID": "ada"}},
        {"extra_body": {"session_id": "ada", "return_in_s": 2.5}},
        {"extra_body": {"prompt_cache_key": "another", "return_in_s": -1}, "user": "ada"},
    ]
    answers = [ask(document(107 + turn), **options) for turn, options in enumerate(named)]
    wait_until(lambda: server.metrics()["trace_lines_total"] == before + 3, "three lines")
    assert server.metrics()["trace_lost_lines_total"] == 0
    lines = [*map(json.loads, (server.logs.parent / "trace.jsonl").read_text().splitlines()[-3:])]
    assert [line["output_length"] for line in lines] == [len(answer.tokens) for answer in answers]
    assert lines[0]["timestamp"] <= lines[1]["timestamp"] <= lines[2]["timestamp"]
    assert lines[0]["session_id"] == lines[1]["session_id"] != lines[2]["session_id"]
    assert [line.get("return_in_s") for line in lines] == [None, 2.5, -1]


def test_time_of_return_is_taken_and_a_wrong_hint_is_refused_in_one_line(server, ask):
    assert server.control("cache/session", session_id="nobody", return_in_s=1, cache_salt="salt") == {"known": False}
    wrong = {"session_id": SECRET * 100, "return_in_s": 1}, {"session_id": "a", "return_in_s": "soon"}
    refused = [
        *(httpx2.post(f"{server.url}/v1/cache/session", json=body) for body in wrong),
        *(caught(ask, extra_body=body) for body in wrong),
        caught(ask, extra_headers={"X-Session-ID": SECRET * 100}),
    ]
    messages = [answer.json()["error"]["message"] for answer in refused]
    assert [answer.status_code for answer in refused] == [400] * len(refused)
    assert not any("\n" in message or SECRET in message for message in messages)
    for index, message in enumerate(messages):
        assert ("return_in_s must be a number" if index in (1, 3) else "a session id must be a text") in message
    logs = "".join(path.read_text(errors="replace") for path in server.logs.rglob("*log*") if path.is_file())
    assert "invalid_request_error" in logs
    assert SECRET not in logs


def test_session_is_known_by_its_salt_and_by_its_header(server, ask):
    def is_known(**fields):
        return server.control("cache/session", return_in_s=9, **fields)["known"]

    ask(document(3), extra_body={"session_id": "seen", "cache_salt": "s"})
    ask(document(3), extra_headers={"X-Session-ID": "header"})
    wait_until(lambda: is_known(session_id="seen", cache_salt="s") and is_known(session_id="header"), "both sessions")
    assert not is_known(session_id="seen")


def caught(ask, **options):
    with pytest.raises(openai.BadRequestError) as error:
        ask("x", **options)
    return error.value.response


def test_a_disconnected_client_gives_its_blocks_back(server, client, ask):
    before = ask(document(101)).tokens
    stream = client.chat.completions.create(model="tiny", messages=document(101), stream=True, top_p=0, **ENDLESS)
    next(iter(stream))
    stream.close()
    assert_all_blocks_come_back(server)
    assert ask(document(101)).tokens == before


@contextlib.contextmanager
def held_stream(server, client, messages):
    """Of a request that has said something and has much more to say, and its id. The worker stands still until
    FastDeploy has heard of the control request that the caller begins.
    """
    steps, log = server.logs.parent / "steps", server.logs / "fastdeploy.log"
    num_heard = lambda: len(HEARD.findall(log.read_text(errors="replace")))  # noqa: E731
    steps.write_text(str(STEPS))
    try:
        stream = client.chat.completions.create(model="tiny", messages=messages, stream=True, top_p=0, **ENDLESS)
        request_id, before = next(iter(stream)).id, num_heard()
        yield stream, request_id
        wait_until(lambda: num_heard() > before, "FastDeploy to hear of the control request")
    finally:
        steps.unlink()


def num_chunks(stream):
    """Until its end, which may be an error: releases differ in what an aborted request is."""
    count = 0
    with contextlib.suppress(openai.APIError):
        for _ in stream:
            count += 1
    return count


@pytest.mark.parametrize("forgets", [False, True])
def test_an_abort_and_a_pause_end_what_runs(server, client, ask, forgets):
    before = ask(document(102)).tokens
    with ThreadPoolExecutor(1) as pool:
        with held_stream(server, client, document(102)) as (stream, request_id):
            # Not abort_all: after a client has disconnected, release 2.5 waits for its request for ever.
            named = ("pause", {}) if forgets else ("abort_requests", {"req_ids": [request_id]})
            controlled = pool.submit(server.control, named[0], **named[1])
        assert num_chunks(stream) < ENDLESS["max_tokens"] - 10
        controlled.result()
    if forgets:
        server.control("resume")
    assert_all_blocks_come_back(server)
    again = ask(document(102))
    assert again.tokens == before
    assert not (forgets and again.cached_tokens)


def pause(server):
    server.control("pause")
    assert server.control("is_paused")["result"] == {"is_paused": True}
    server.control("resume")
    assert server.control("is_paused")["result"] == {"is_paused": False}


def sleep(server, tags):
    server.control("sleep", tags=tags)
    server.control("wakeup", tags=tags)


@pytest.mark.parametrize(
    "interrupt", [pause, *(partial(sleep, tags=tags) for tags in ("kv_cache", "weight", "weight,kv_cache"))]
)
def test_pause_and_sleep_forget_the_cache_and_the_server_serves_again(server, ask, interrupt):
    before = [ask(document(index)).tokens for index in range(NUM_DOCUMENTS)]
    interrupt(server)
    again, warm = ([ask(document(index)) for index in range(NUM_DOCUMENTS)] for _ in range(2))
    assert [answer.cached_tokens for answer in again] == [0] * NUM_DOCUMENTS
    assert min(answer.cached_tokens for answer in warm) > 0
    assert [answer.tokens for answer in again] == [answer.tokens for answer in warm] == before


def test_nothing_computed_with_old_weights_is_used_with_new_ones(server, ask):
    old = ask(document(0)).tokens
    for seed in (1, 0):
        write_seed(server.model, seed)
        server.control("pause")
        server.control("update_weights")
        server.control("resume")
        answer = ask(document(0))
        assert answer.cached_tokens == 0
        assert (answer.tokens == old) == (seed == 0)


def test_a_request_that_cannot_fit_is_refused_and_the_server_lives(ask):
    with pytest.raises(openai.APIStatusError):
        ask("x" * 2000)
    assert len(ask("still there?").tokens) > 0
