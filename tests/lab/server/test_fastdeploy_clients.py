"""A client of FastDeploy can talk to this server: what it sends is served, ignored, or refused with a reason."""

import pytest

from fastdeploy_kvcache_v1.lab.server.field_names import IGNORED
from fastdeploy_kvcache_v1.lab.server.request_fields import REFUSED
from tests.lab.server.harness import expected_outputs
from tests.lab.server.random_text import BOS, END, EOS
from tests.lab.server.served import chunks_of, error_of, running

HELLO = [BOS, *b"hello"]


def sampling_of(server):
    """Of every task that the worker was sent for the request before."""
    batches = server.worker.worker.batches
    found = [task.sampling for batch in batches for task in batch.requests]
    batches.clear()
    return found


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({"temperature": 0}, "temperature", 0),
        ({"top_p": 0}, "top_p", 0),
        ({"top_k": 5}, "top_k", 5),
        ({"top_k": -1}, "top_k", -1),
        ({"min_p": 0.1}, "min_p", 0.1),
        ({"seed": 922337203685477580}, "seed", 922337203685477580),
    ],
)
def test_sampling_fields_reach_the_sampler(server, given, name, value):
    for send in (server.complete, server.chat):
        assert send(prompt="hello", **given).status_code == 200
        assert {getattr(sampling, name) for sampling in sampling_of(server)} == {value}


@pytest.mark.parametrize("name", sorted(IGNORED | {"nobody_knows_it", "enable_thinking"}))
def test_fields_without_effect_are_ignored(server, name):
    for value in (None, True, 7, "text", [1], {"key": 1}):
        answer = server.complete(prompt="hello", **{name: value}).json()
        assert answer["choices"][0]["text"] == bytes(expected_outputs(HELLO, 8)).decode()


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_field_that_would_change_the_answer_is_refused_with_advice(server, name):
    neutral, advice = REFUSED[name]
    for send in (server.complete, server.chat):
        for value in (None, *neutral):
            assert send(prompt="hello", **{name: value}).status_code == 200
        response = send(prompt="hello", **{name: [17]})
        assert response.status_code == 400
        error = error_of(response)
        assert (error["param"], error["message"]) == (name, f"{name}=[17] is not supported by this server: {advice}")


@pytest.mark.parametrize("model", ["default", "tiny", "gpt-17", "", None])
def test_any_model_name_is_served_unless_the_server_was_given_one(server, model):
    assert server.complete(prompt="hello", model=model).json()["model"] == "tiny"


def test_a_server_with_a_name_serves_it_and_default():
    with running(checks_model_name=True) as server:
        for model in ("default", "tiny", "", None):
            assert server.complete(prompt="hello", model=model).json()["model"] == "tiny"
        response = server.complete(prompt="hello", model="gpt-17")
        assert response.status_code == 404
        error = error_of(response)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "'gpt-17'" in error["message"]
        assert "'default'" in error["message"]


@pytest.mark.parametrize("ids", [HELLO, [HELLO]])
def test_prompt_token_ids_take_the_place_of_the_prompt(server, ids):
    text = bytes(expected_outputs(HELLO, 8)).decode()
    for given in ({}, {"prompt": ""}, {"prompt": "something else"}):
        answer = server.complete(prompt_token_ids=ids, **given).json()
        assert answer["choices"][0]["text"] == text
    for messages in ([], [{"role": "user", "content": "something else"}]):
        answer = server.chat(messages=messages, prompt_token_ids=ids).json()
        assert answer["choices"][0]["message"]["content"] == text


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ("text", "must be one list of token ids"),
        ([1, "2"], "must be one list of token ids"),
        ([[1], [2]], "send one request for each prompt"),
        ([-1], "token ids must lie in 0.."),
        ([10**9], "token ids must lie in 0.."),
    ],
)
def test_bad_prompt_token_ids_are_one_clear_line(server, ids, message):
    for send in (server.complete, server.chat):
        response = send(prompt="hello", prompt_token_ids=ids)
        assert response.status_code == 400
        error = error_of(response)
        assert error["param"] == "prompt_token_ids"
        assert message in error["message"]


def test_returned_token_ids_stand_where_clients_of_both_servers_look(server):
    outputs = expected_outputs(HELLO, 8)
    choice = server.complete(prompt="hello", return_token_ids=True).json()["choices"][0]
    assert (choice["prompt_token_ids"], choice["completion_token_ids"]) == (HELLO, outputs)
    choice = server.chat(prompt_token_ids=HELLO, return_token_ids=True).json()["choices"][0]
    message = choice["message"]
    assert (message["prompt_token_ids"], message["completion_token_ids"]) == (HELLO, outputs)
    assert choice["token_ids"] == outputs
    assert "completion_token_ids" not in server.complete(prompt="hello").text


def test_streamed_token_ids_begin_with_those_of_the_prompt(server):
    outputs = expected_outputs(HELLO, 8)
    for send, place in ((server.complete, lambda c: c), (server.chat, lambda c: c["delta"])):
        choices = [
            chunk["choices"][0]
            for chunk in chunks_of(send(prompt="hello", prompt_token_ids=HELLO, stream=True, return_token_ids=True))
        ]
        first, *rest = map(place, choices)
        assert first["prompt_token_ids"] == HELLO
        assert [choice["completion_token_ids"] for choice in rest] == [[token] for token in outputs]
        assert [choice["token_ids"] for choice in choices] == [[], *([token] for token in outputs)]


def test_every_chunk_of_a_chat_has_content(server):
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks_of(server.chat(stream=True, min_tokens=3))]
    assert {type(delta["content"]) for delta in deltas} == {str}


@pytest.mark.parametrize("options", [{}, {"include_usage": True}, {"continuous_usage_stats": None}])
def test_stream_options_include_the_usage_unless_told_otherwise(server, options):
    last = chunks_of(server.complete(prompt="hello", stream=True, stream_options=options))[-1]
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 8)


@pytest.mark.parametrize("options", [None, {"include_usage": False}])
def test_streams_without_usage(server, options):
    assert "usage" not in server.complete(prompt="hello", stream=True, stream_options=options).text


def test_continuous_usage_counts_the_output_so_far(server):
    options = {"continuous_usage_stats": True, "include_usage": False}
    chunks = chunks_of(server.complete(prompt="hello", stream=True, stream_options=options))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {6}


def test_the_model_does_not_end_before_min_tokens(server):
    ends = (EOS, END)
    server.complete(prompt="hello", min_tokens=3)
    assert [sampling.banned_tokens for sampling in sampling_of(server)] == [ends] * 3 + [()] * 5
    server.complete(prompt="hello", min_tokens=3, ignore_eos=True)
    assert {sampling.banned_tokens for sampling in sampling_of(server)} == {()}


def test_max_tokens_beyond_the_model_are_cut(server):
    for name in ("max_tokens", "max_completion_tokens"):
        usage = server.chat(prompt_token_ids=HELLO, **{"max_tokens": None, name: 10**6}).json()["usage"]
        assert usage["total_tokens"] == 200


def test_request_fields_in_metadata_are_refused_and_others_ignored(server):
    assert server.chat(metadata={"customer": "7", "trace": {"id": 1}}).status_code == 200
    for name, advice in (
        ("temperature", "move temperature out of metadata, beside messages"),
        ("bad_words", "move bad_words out of metadata, beside messages"),
        ("enable_thinking", "move enable_thinking into chat_template_kwargs"),
    ):
        response = server.chat(metadata={name: 0})
        assert (response.status_code, error_of(response)["param"]) == (400, "metadata")
        assert advice in error_of(response)["message"]


def test_fields_of_the_chat_template_are_accepted(server):
    given = {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"}
    assert server.chat(**given).status_code == 200
    assert server.chat(reasoning_effort="none at all").status_code == 400
