"""The HTTP face over a worker without a model: bodies, streams, bad input, failures, metrics."""

import json
import random
import re
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.contract.messages import CopyPath
from fastdeploy_kvcache_v1.lab.model.config import BYTE_VOCAB_SIZE
from fastdeploy_kvcache_v1.lab.server.app import MAX_BODY
from fastdeploy_kvcache_v1.lab.server.field_names import IGNORED
from fastdeploy_kvcache_v1.lab.server.request_fields import REFUSED, ChatBody, CompletionBody
from fastdeploy_kvcache_v1.lab.server.text import load_tokenizer
from tests.lab.server.harness import expected_outputs
from tests.lab.server.random_text import BOS
from tests.lab.server.served import chunks_of, error_of, running


def test_completion(server):
    body = server.complete(prompt="hello", return_token_ids=True).json()
    tokens = expected_outputs([BOS, *b"hello"], 8)
    assert body["object"] == "text_completion"
    assert body["model"] == "tiny"
    choice = body["choices"][0]
    assert choice["text"] == bytes(tokens).decode()
    assert choice["token_ids"] == tokens
    assert choice["finish_reason"] == "length"
    assert body["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 8,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_streamed_completion_equals_the_plain_one(server):
    plain = server.complete(prompt="hello").json()
    response = server.complete(prompt="hello", stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = chunks_of(response)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 8
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == plain["choices"][0]["text"]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]]
    assert reasons == [None] * 7 + ["length"]


def test_chat(server):
    messages = [{"role": "user", "content": [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]}]
    body = server.chat(messages=messages, max_tokens=None, max_completion_tokens=5).json()
    prompt = load_tokenizer(None).apply_chat_template([{"role": "user", "content": "hello"}])
    assert body["object"] == "chat.completion"
    text = bytes(expected_outputs(prompt, 5)).decode()
    assert body["choices"][0]["message"] == {"role": "assistant", "content": text}
    chunks = chunks_of(server.chat(messages=messages, max_tokens=5, stream=True, model="tiny"))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == text


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_chat_without_limit_runs_to_the_models_limit_and_logs_it_once(server, caplog):
    for _ in range(2):
        usage = server.chat(max_tokens=None).json()["usage"]
        assert usage["total_tokens"] == 200
    (line,) = warnings(caplog)
    assert f"may run for {usage['completion_tokens']} output tokens, which fill --max-model-len 200: " in line


def test_chat_without_limit_names_the_device_tier_that_limits_it(caplog):
    with running(KVCacheConfig(20, block_size=4)) as server:
        usage = server.chat(max_tokens=None).json()["usage"]
    assert usage["total_tokens"] == 81, "the last token is sampled and not stored"
    assert "which fill the device tier's 20 blocks of 4 tokens: send max_tokens" in warnings(caplog)[0]


@pytest.mark.parametrize("limit", [{"max_tokens": 8}, {"max_completion_tokens": 8, "max_tokens": None}])
def test_a_chat_with_a_limit_and_a_completion_without_log_nothing(server, caplog, limit):
    assert server.chat(**limit).status_code == 200
    assert server.client.post("/v1/completions", json={"prompt": "x"}).status_code == 200
    assert warnings(caplog) == []


def test_stop_string_and_stop_token(server):
    text = server.complete(prompt="hello").json()["choices"][0]["text"]
    for options in ({"stop": text[3:5]}, {"stop": ["\0", text[3:5]]}, {"stop_token_ids": [ord(text[3])]}):
        choice = server.complete(prompt="hello", **options).json()["choices"][0]
        end = text.index(text[3]) if "stop_token_ids" in options else text.index(text[3:5])
        assert (choice["text"], choice["finish_reason"]) == (text[:end], "stop")


def test_models(server):
    models = server.client.get("/v1/models").json()
    assert [model["id"] for model in models["data"]] == ["tiny"]
    assert server.client.get("/v1/models/tiny").json()["max_model_len"] == 200
    assert server.client.get("/v1/models/other").status_code == 404


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "prompt", "prompt: the field is missing: send a string or a list of token ids"),
        ({"prompt": ""}, "prompt", "must not be empty"),
        ({"prompt": []}, "prompt", "must not be empty"),
        ({"prompt": 7}, "prompt", "must be one string or one list of token ids"),
        ({"prompt": ["a", "b"]}, "prompt", "send one request for each prompt"),
        ({"prompt": [True]}, "prompt", "must be one string or one list of token ids"),
        ({"prompt": [1, BYTE_VOCAB_SIZE]}, "prompt", f"token ids must lie in 0..{BYTE_VOCAB_SIZE - 1}"),
        ({"prompt": [-1]}, "prompt", "token ids must lie in"),
        ({"prompt": "x" * 200}, "prompt", "201 tokens are too long for --max-model-len 200"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"prompt": "x", "max_tokens": "many"}, "max_tokens", "valid integer"),
        ({"prompt": "x", "temperature": -0.5}, "temperature", "greater than or equal to 0"),
        ({"prompt": "x", "top_p": -0.1}, "top_p", "greater than or equal to 0"),
        ({"prompt": "x", "top_p": 1.5}, "top_p", "less than or equal to 1"),
        ({"prompt": "x", "seed": 2**64}, "seed", "less than or equal to"),
        ({"prompt": "x", "stop": ["a", ""]}, "stop.1", "at least 1 character"),
        ({"prompt": "x", "stop": 7}, "stop", "valid list"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "Field required"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages",
            "image_url must be a data URL",
        ),
        ({"messages": [{"role": "martian", "content": "x"}]}, "messages", "unknown message role 'martian'"),
        (
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]},
            "messages.0",
            "tool_calls is not supported",
        ),
    ],
)
def test_bad_requests_are_one_clear_line(server, body, param, message):
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    response = server.client.post(path, json=body)
    assert response.status_code == 400
    error = error_of(response)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert message in error["message"]
    assert server.complete(prompt="hello").status_code == 200


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{bad", "the request body is not valid JSON"),
        ("[1]", "the request body must be a JSON object"),
        ('{"prompt": "x", "temperature": NaN}', "temperature"),
        (b'{"prompt": "x", "cache_salt": "\\ud800"}', "cache_salt: Input should be a valid string"),
        (b"\xff", "error parsing the body"),
        (b"[" * 10**6, "error parsing the body"),
    ],
)
def test_malformed_bodies(server, content, message):
    response = server.client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert message in error_of(response)["message"]


def test_a_body_that_says_that_it_is_too_large_is_not_read(server):
    headers = {"content-type": "application/json", "content-length": str(MAX_BODY + 1)}
    response = server.client.post("/v1/completions", content=b"{", headers=headers)
    assert response.status_code == 413
    assert error_of(response)["message"] == "the request body is larger than 16 MiB: shorten it"


def test_request_that_can_never_fit_the_device_tier_is_refused():
    with running(KVCacheConfig(3, block_size=4)) as server:
        response = server.complete(prompt=[1] * 5, max_tokens=9)
        assert response.status_code == 400
        assert "do not fit the device tier's 3 blocks of 4 tokens" in error_of(response)["message"]
        assert server.complete(prompt=[1] * 5, max_tokens=8).status_code == 200
        response = server.client.post("/v1/completions", json={"prompt": [1] * 5})
        assert response.json()["usage"]["completion_tokens"] == 8, "the default shrinks to what fits"


def test_worker_death_fails_open_and_later_requests(server):
    server.worker.gate.clear()
    responses = []
    threads = [
        threading.Thread(target=lambda stream=stream: responses.append(server.complete(prompt="hello", stream=stream)))
        for stream in (False, True)
    ]
    for thread in threads:
        thread.start()
    server.wait_for(lambda report: report["running"] + report["waiting"] == 2)
    assert server.client.get("/health").status_code == 200
    server.worker.die("the worker process 7 was killed by SIGKILL")
    for thread in threads:
        thread.join()
    responses += [server.complete(prompt="late"), server.client.get("/health")]
    for response in responses:
        assert response.status_code == 503
        assert error_of(response)["message"] == "the worker process 7 was killed by SIGKILL"
    assert server.wait_fatal() == ["the worker process 7 was killed by SIGKILL"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_says_why_its_prompt_missed_if_it_is_asked(server, stream):
    prompt = "a prompt of some length"

    def details(**fields):
        response = server.complete(prompt=prompt, stream=stream, stream_options={"include_usage": True}, **fields)
        bodies = chunks_of(response) if stream else [response.json()]
        return bodies[-1]["usage"]["prompt_tokens_details"]

    nothing = {"tier_last_held": None, "evicted_s_ago": None, "blocks_short": None}
    assert details(cache_report=True) == {"cached_tokens": 0, "reason": "never_seen", "at_token": 0, **nothing}
    again = details(cache_report=True)
    cached = again["cached_tokens"]
    assert cached > 0
    assert again == {"cached_tokens": cached, "reason": "partial_block", "at_token": cached, **nothing}
    assert details(cache_report=True, cache_salt="other")["reason"] == "never_seen"
    assert details(cache_report=True, skip_reading_prefix_cache=True)["reason"] == "skipped_by_request"
    assert details() == {"cached_tokens": cached}
    assert server.client.post("/reset_prefix_cache").status_code == 200
    assert details(cache_report=True) == {"cached_tokens": 0, "reason": "reset", "at_token": 0, **nothing}


def test_reset_forgets_the_cache(server):
    for _ in range(2):
        usage = server.complete(prompt="a prompt of some length").json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        answer = {"status": "ok", "reset": ["device", "host"], "kept": []}
        assert server.client.post("/reset_prefix_cache?reset_external=true").json() == answer
    assert server.client.post("/reset_prefix_cache?reset_external=perhaps").status_code == 400


def test_metrics(server):
    for _ in range(2):
        server.complete(prompt="a prompt of some length")
    paths = CopyPath("in", "some"), CopyPath("out", "other", "it is slow")
    server.engine.core.counters.copies[0].paths = paths
    text = server.client.get("/metrics").text
    for line in (
        "device_blocks 64.0",
        "query_tokens_total 48.0",
        "device_hit_tokens_total 20.0",
        "host_hit_tokens_total 0.0",
        "requests_finished_total 2.0",
        'requests{state="running"} 0.0',
        'requests_ended_total{outcome="finished"} 2.0',
        "generated_tokens_total 16.0",
        "time_to_first_token_seconds_count 2.0",
        'swap_bytes_total{direction="in",rank="0"} 0.0',
        'copy_path{direction="in",path="some",rank="0",reason=""} 1.0',
        'copy_path{direction="out",path="other",rank="0",reason="it is slow"} 0.0',
    ):
        assert f"fastdeploy:kvcache_v1_{line}" in text.splitlines()


class PanicError(BaseException):
    """As the tokenizer's Rust raises it: no `Exception`."""


@pytest.mark.parametrize("error", [ZeroDivisionError("a bug"), PanicError("here")])
def test_whatever_a_step_raises_ends_the_requests_and_hangs_none(server, monkeypatch, caplog, error):
    def broken():
        raise error

    monkeypatch.setattr(server.engine.core, "step", broken)
    for _ in range(2):
        response = server.complete(prompt="hello")
        assert (response.status_code, error_of(response)["message"]) == (503, f"internal error: {error!r}")
    assert server.wait_fatal() == [f"internal error: {error!r}"]
    assert "Traceback" in caplog.text


def test_closed_engine_refuses_and_closes_twice():
    with running() as server:
        server.engine.close()
        assert server.complete(prompt="hello").status_code == 503
        assert server.client.get("/debug/check").status_code == 503
        assert server.client.post("/reset_prefix_cache").status_code == 503


def test_health_says_that_the_worker_stands_still_until_it_goes_on():
    with running() as server, ThreadPoolExecutor() as pool:
        server.engine._patience_s = 0
        server.worker.gate.clear()
        answer = pool.submit(server.complete, prompt="hello")
        server.wait_for(lambda report: report["running"])
        health = server.client.get("/health")
        assert health.status_code == 503
        assert error_of(health)["message"] == "the worker has computed no layer for 0 s"
        server.worker.gate.set()
        assert answer.result().status_code == 200
        assert server.client.get("/health").status_code == 200


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models", "/v1/models/tiny", "/debug/check"])
def test_what_can_be_read_has_a_head(server, path):
    assert server.client.head(path).status_code == server.client.get(path).status_code == 200


def test_an_answer_has_the_id_that_the_client_gave(server, caplog):
    caplog.set_level("INFO")
    ids = []
    for _ in range(2):
        response = server.client.post("/v1/completions", json={"prompt": "x"}, headers={"X-Request-Id": "order 7/8"})
        assert response.headers["x-request-id"] == "order 7/8"
        ids.append(response.json()["id"])
    assert ids[0] != ids[1]
    assert all(each.startswith("cmpl-order_7_8-") for each in ids)
    assert caplog.messages.count("order 7/8 POST /v1/completions: 200") == 2


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nothing", 404), ("POST", "/v1/completions", 400), ("PUT", "/v1/models", 405), ("GET", "/health", 200)],
)
def test_every_answer_has_an_id(server, method, path, status):
    responses = [server.client.request(method, path) for _ in range(2)]
    assert [response.status_code for response in responses] == [status, status]
    assert len({response.headers["x-request-id"] for response in responses}) == 2


def test_bug_is_one_line_for_the_client_and_a_traceback_in_the_log(server, monkeypatch, caplog):
    def broken(*arguments, **options):
        raise KeyError(object())

    monkeypatch.setattr(server.engine, "submit", broken)
    response = server.client.post("/v1/completions", json={"prompt": "x"}, headers={"X-Request-Id": "seven"})
    assert response.status_code == 500
    assert error_of(response)["message"] == "internal error: KeyError, see the server's log"
    assert response.headers["x-request-id"] == "seven"
    assert "request seven failed" in caplog.text
    assert "Traceback" in caplog.text


FIELDS = sorted({*CompletionBody.model_fields, *ChatBody.model_fields, *REFUSED, *IGNORED, "unknown"})
VALUES = [
    *(None, True, False, 0, 1, -1, 2**63, 10**30, 0.5, -0.5, 1e308, "", "x", "7", "default", "half \ud800", "\0"),
    *([], [1], [[1]], ["x"], [["x"]], [None], [300], {}, {"a": 1}, {"type": "text"}, [{"role": "user", "content": ""}]),
    *([{"role": "user"}], [{"role": "robot", "content": ["x"]}], [{"role": "user", "content": [{"type": "text"}]}]),
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}]}],
]


def test_no_body_leaves_a_trace_or_anything_but_one_line(server):
    """1,000 of them; what is answered runs to its end."""
    rng = random.Random(39)
    good = {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    statuses = Counter()
    for _ in range(1000):
        body = good | {rng.choice(FIELDS): rng.choice(VALUES) for _ in range(rng.randint(1, 3))} | {"max_tokens": 2}
        path = rng.choice(["/v1/completions", "/v1/chat/completions"])
        response = server.client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
        statuses[response.status_code] += 1
        if response.status_code != 200:
            error = error_of(response)
            assert (response.status_code, error["type"]) == (400, "invalid_request_error"), (body, error)
            assert not re.search(r"0x[0-9a-f]{6}|<.* object", error["message"])
    assert min(statuses.values()) > 100, statuses
    report = server.client.get("/debug/check").json()
    cache = report.pop("cache")
    assert report == {"ok": True, "idle": True, "storage_idle": True, "running": 0, "waiting": 0}
    assert cache["device_free_blocks"] + cache["device_cached_blocks"] == 64
