"""What a user can do to a running server: streams, aborts, pause, sleep, new weights, all while the cache is in use."""

import contextlib
import json

import httpx
import openai
import pytest

from fastdeploy_kvcache_v1.model.random_directory import write_seed
from fastdeploy_kvcache_v1.trace_recorder import VARIABLE

from .cpu_server import BLOCK_SIZE, started, wait_until
from .fastdeploy_trees import RELEASES
from .server_workload import NUM_DOCUMENTS, document, user

pytestmark = [pytest.mark.process, pytest.mark.fastdeploy, pytest.mark.timeout(600)]

FLAGS = ("--num-gpu-blocks-override", "24", "--swap-space", "0.02", "--write-policy", "write_through")
ENDLESS = {"max_tokens": 440, "extra_body": {"min_tokens": 440}}


@pytest.fixture(scope="module")
def server(release, tmp_path_factory):
    environment = {"FD_ENABLE_REQUEST_DISCONNECT_STOP_INFERENCE": "1"}
    directory = tmp_path_factory.mktemp("server")
    trace = directory / "trace.jsonl"
    if release == RELEASES[0]:
        environment[VARIABLE], flags = str(trace), FLAGS
    else:  # `serve` makes a variable of its flag
        flags = (*FLAGS, "--record-trace", str(trace))
    with started(release, directory, *flags, environment=environment) as running:
        yield running
        assert running.stop() == 0, running.stderr


@pytest.fixture
def ask(server, client):
    return lambda messages, **options: server.ask(client, messages, **options)


def assert_all_blocks_come_back(server):
    def is_idle():
        metrics = server.metrics()
        return metrics["device_free_blocks"] + metrics["device_evictable_blocks"] == 24

    wait_until(is_idle, "all device blocks to be free or evictable")


def test_a_repeat_is_cached_and_the_same(server, ask):
    cold, warm = ask(document(100)), ask(document(100))
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 6 * BLOCK_SIZE)
    assert cold.tokens == warm.tokens


def test_a_host_tier_is_as_large_as_asked_and_what_is_copied_to_it_is_in_the_metrics(server, ask):
    """Over the way back from the worker: the scheduler's own counts have other names."""
    ask(document(106))
    ask(document(106))
    wait_until(lambda: server.worker_copies().swap_out.blocks, "the worker to copy a block")
    copied = server.worker_copies().swap_out
    block_bytes = copied.bytes // copied.blocks
    assert server.metrics()["host_blocks"] == int(0.02 * 1024**3) // block_bytes
    logs = [path.read_text(errors="replace") for path in server.logs.rglob("*log*") if path.is_file()]
    assert any(f" host blocks of {block_bytes} bytes on each of 1 tensor-parallel ranks" in text for text in logs)
    assert not any("the engine expected" in text for text in logs), "the worker allocates what the engine counted"

    def shown():
        copies, metrics = server.worker_copies(), server.metrics()
        assert server.failed_copies() == metrics["transfer_failures_total"] == 0
        return [
            (getattr(copies.swap_out, unit) + getattr(copies.swap_in, unit), metrics[f"swap_{unit}_total"])
            for unit in ("blocks", "bytes")
        ]

    wait_until(lambda: all(real == told > 0 for real, told in shown()), lambda: f"{shown()} to agree")
    assert server.metrics()["swap_seconds_total"] > 0


def test_requests_are_recorded_with_their_user(server, ask):
    """That a replay of such a trace hits what the server hit: `engine/test_traced_requests.py`."""
    before = server.metrics()["trace_lines_total"]
    answers = [ask(document(107 + turn), user="ada") for turn in range(2)]
    wait_until(lambda: server.metrics()["trace_lines_total"] == before + 2, "two lines")
    assert server.metrics()["trace_lost_lines_total"] == 0
    first, second = map(json.loads, (server.logs.parent / "trace.jsonl").read_text().splitlines()[-2:])
    assert first["session_id"] == second["session_id"]
    assert [first["output_length"], second["output_length"]] == [len(answer.tokens) for answer in answers]
    assert first["timestamp"] <= second["timestamp"]


def test_a_stream_says_the_same(server, client, ask):
    whole = ask(document(100), max_tokens=30)
    stream = client.chat.completions.create(
        model="tiny", messages=document(100), max_tokens=30, temperature=0, top_p=0, stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == whole.text


def test_completions_answer_too(client):
    options = {"model": "tiny", "prompt": "once upon a time " * 8, "max_tokens": 8, "top_p": 0}
    first, second = (client.completions.create(**options).choices[0].text for _ in range(2))
    assert first == second


def test_a_disconnected_client_gives_its_blocks_back(server, client, ask):
    before = ask(document(101)).tokens
    stream = client.chat.completions.create(model="tiny", messages=document(101), stream=True, top_p=0, **ENDLESS)
    next(iter(stream))
    stream.close()
    assert_all_blocks_come_back(server)
    assert ask(document(101)).tokens == before


def running_streams(client, indices):
    """Requests that have said something and have much more to say, and their ids."""
    streams = [
        client.chat.completions.create(model="tiny", messages=document(index), stream=True, top_p=0, **ENDLESS)
        for index in indices
    ]
    return streams, [next(iter(stream)).id for stream in streams]


def num_chunks(stream):
    """Until its end, which may be an error: releases differ in what an aborted request is."""
    count = 0
    with contextlib.suppress(openai.APIError):
        for _ in stream:
            count += 1
    return count


def test_abort_requests_ends_them(server, client, ask):
    before = ask(document(102)).tokens
    streams, ids = running_streams(client, range(102, 105))
    # Not abort_all: after a client has disconnected, release 2.5 waits for its request for ever.
    server.control("abort_requests", req_ids=ids)
    assert max(num_chunks(stream) for stream in streams) < ENDLESS["max_tokens"] - 10
    assert_all_blocks_come_back(server)
    assert ask(document(102)).tokens == before


def test_pause_forgets_the_cache_and_resume_serves_again(server, ask):
    before = [ask(document(index)).tokens for index in range(NUM_DOCUMENTS)]
    server.control("pause")
    assert server.control("is_paused")["result"] == {"is_paused": True}
    server.control("resume")
    assert server.control("is_paused")["result"] == {"is_paused": False}
    again = [ask(document(index)) for index in range(NUM_DOCUMENTS)]
    assert [answer.cached_tokens for answer in again] == [0] * NUM_DOCUMENTS
    assert [answer.tokens for answer in again] == before


def test_pause_while_requests_run(server, client, ask):
    streams, _ = running_streams(client, range(103, 105))
    server.control("pause")
    assert max(num_chunks(stream) for stream in streams) < ENDLESS["max_tokens"] - 10
    server.control("resume")
    assert_all_blocks_come_back(server)
    assert ask(document(103)).cached_tokens == 0


@pytest.mark.parametrize("tags", ["kv_cache", "weight", "weight,kv_cache"])
def test_sleep_and_wakeup(server, ask, tags):
    before = [ask(document(index)).tokens for index in range(NUM_DOCUMENTS)]
    server.control("sleep", tags=tags)
    server.control("wakeup", tags=tags)
    again = [ask(document(index)) for index in range(NUM_DOCUMENTS)]
    assert [answer.cached_tokens for answer in again] == [0] * NUM_DOCUMENTS
    assert [answer.tokens for answer in again] == before
    warm = [ask(document(index)) for index in range(NUM_DOCUMENTS)]
    assert min(answer.cached_tokens for answer in warm) > 0
    assert [answer.tokens for answer in warm] == before


def test_nothing_computed_with_old_weights_is_used_with_new_ones(server, ask):
    old = ask(document(0)).tokens
    answers = []
    for seed in (1, 0):
        write_seed(server.model, seed)
        server.control("pause")
        server.control("update_weights")
        server.control("resume")
        answers.append(ask(document(0)))
    assert [answer.cached_tokens for answer in answers] == [0, 0]
    assert answers[0].tokens != old
    assert answers[1].tokens == old


def test_a_request_that_cannot_fit_is_refused_and_the_server_lives(server, ask):
    reply = httpx.post(
        f"{server.url}/v1/chat/completions", json={"model": "tiny", "messages": user("x" * 2000)}, timeout=60
    )
    assert reply.status_code >= 400
    assert len(ask(user("still there?")).tokens) > 0
