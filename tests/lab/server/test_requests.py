"""From a body to tokens and options: what is neutral, and what is refused in one line."""

import pytest
from pydantic import ValidationError

from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.lab.server.api_error import ApiError, describe_validation
from fastdeploy_kvcache_v1.lab.server.request_fields import ChatBody, CompletionBody
from fastdeploy_kvcache_v1.lab.server.requests import RequestReader
from fastdeploy_kvcache_v1.lab.server.settings import ServerConfig
from fastdeploy_kvcache_v1.lab.server.text import load_tokenizer

CONFIG = ServerConfig(cache=KVCacheConfig(64, block_size=4), max_model_len=200)
USER = {"role": "user", "content": "hi"}


def read(body, tokenizer=None):
    reader = RequestReader(CONFIG, tokenizer or load_tokenizer(None))
    return (
        reader.chat(ChatBody.model_validate(body))
        if "messages" in body
        else reader.completion(CompletionBody.model_validate(body))
    )


def generation(body):
    reader = RequestReader(CONFIG, load_tokenizer(None))
    return reader.generation(read({"seed": 1, **body}), "r", print)


def refusal(body, tokenizer=None):
    """Its line."""
    with pytest.raises((ApiError, ValidationError)) as caught:
        read(body, tokenizer)
    if isinstance(caught.value, ApiError):
        assert caught.value.status == 400
        return str(caught.value)
    return describe_validation(caught.value.errors())[0]


@pytest.mark.parametrize(
    "neutral",
    [
        *({name: None} for name in ("model", "temperature", "top_p", "stop", "stream", "stream_options")),
        *({name: None} for name in ("max_tokens", "min_tokens", "ignore_eos", "stop_token_ids", "return_token_ids")),
        {"stop": ""},
        {"stop": []},
        {"model": ""},
        {"tools": []},
        *({name: None} for name in ("cache_salt", "skip_reading_prefix_cache", "skip_writing_prefix_cache")),
        {"disable_prefix_caching": None},
        {"skip_reading_prefix_cache": False, "skip_writing_prefix_cache": False, "disable_prefix_caching": False},
        {"never_heard_of": {"a": [1]}},
    ],
    ids=str,
)
def test_a_neutral_value_changes_nothing(neutral):
    for body in ({"prompt": "hi"}, {"messages": [USER]}):
        assert generation({**body, **neutral}).request == generation(body).request


@pytest.mark.parametrize("salt", ["s", "\u00e9\U0001f511", " ", "x" * 1024])
@pytest.mark.parametrize("body", [{"prompt": "x" * 8}, {"messages": [USER]}])
def test_who_shares_blocks_and_what_a_request_may_do_with_them(body, salt):
    def hasher(**fields):
        return read({**body, **fields}).hasher

    alone, shared = hasher(cache_salt=salt, skip_reading_prefix_cache=True), hasher(skip_writing_prefix_cache=True)
    assert (alone.access.reads, alone.access.writes) == (False, True)
    assert (shared.access.reads, shared.access.writes) == (True, False)
    neither = hasher(disable_prefix_caching=True).access
    assert (neither.reads, neither.writes) == (False, False)
    assert alone.hashes[0] != shared.hashes[0] == hasher().hashes[0]


@pytest.mark.parametrize("salt", ["", "x" * 1025, 7, True, ["s"], {}])
def test_a_salt_that_is_none_is_refused_and_not_repeated(salt):
    """An empty one is a mistake of the client: it believes that its blocks are its own."""
    message = refusal({"prompt": "x", "cache_salt": salt})
    assert message.startswith("cache_salt: ")
    assert "xx" not in message


@pytest.mark.parametrize("name", ["skip_reading_prefix_cache", "skip_writing_prefix_cache", "disable_prefix_caching"])
def test_what_is_no_boolean_is_refused(name):
    assert refusal({"prompt": "x", name: "perhaps"}).startswith(f"{name}: ")


@pytest.mark.parametrize("name", ["cache_salt", "skip_writing_prefix_cache"])
def test_the_cache_fields_are_not_read_from_metadata_and_not_lost_there(name):
    assert refusal({"messages": [USER], "metadata": {name: "x"}}).startswith("metadata: ")


@pytest.mark.parametrize(("prompt", "same"), [(["hi"], "hi"), ([[5, 6]], [5, 6])])
def test_a_list_of_one_prompt_is_that_prompt(prompt, same):
    assert read({"prompt": prompt}).token_ids == read({"prompt": same}).token_ids


@pytest.mark.parametrize("prompt", [["a", "b"], [[1], [2]], [["a"]], [[]], [None], [[[1]]]])
def test_other_lists_are_no_prompt(prompt):
    assert refusal({"prompt": prompt}).startswith("prompt: must ")


@pytest.mark.parametrize("content", [None, "", []])
def test_no_content_is_an_empty_content(content):
    body = {"messages": [USER, {"role": "assistant", "content": content}]}
    assert read(body).token_ids == tuple(
        load_tokenizer(None).apply_chat_template([USER, {"role": "assistant", "content": ""}])
    )


def test_parts_count_by_their_text():
    parts = [{"type": "text", "text": "x" * 50}] * 4
    body = {"messages": [{"role": "user", "content": parts}]}
    assert "messages: 204 tokens are too long for --max-model-len 200" in refusal(body)


def test_an_answer_never_carries_half_a_character():
    ApiError(400, "half a \ud800 pair").body["error"]["message"].encode()
