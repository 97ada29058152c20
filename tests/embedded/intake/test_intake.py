"""From a body to tokens and options: what is neutral, what is refused, and where checking ends."""

import json

import pytest

from fastdeploy_kvcache_v1.embedded.api_error import ApiError
from fastdeploy_kvcache_v1.embedded.intake.intake import Endpoint, Intake, IntakeConfig
from fastdeploy_kvcache_v1.embedded.text import load_tokenizer

CONFIG = IntakeConfig(None, "tiny", 264, 200, 64, 4, 16)
USER = {"role": "user", "content": "hi"}


def read(body, endpoint=Endpoint.COMPLETION, tokenizer=None):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Intake(CONFIG, tokenizer or load_tokenizer(None)).read(endpoint, raw)


def refusal(body, endpoint=Endpoint.COMPLETION, tokenizer=None):
    with pytest.raises(ApiError) as caught:
        read(body, endpoint, tokenizer)
    assert caught.value.status == 400
    return str(caught.value)


@pytest.mark.parametrize(
    "neutral",
    [
        *({name: None} for name in ("model", "temperature", "top_p", "seed", "stop", "stream", "stream_options")),
        *({name: None} for name in ("max_tokens", "min_tokens", "ignore_eos", "stop_token_ids", "return_token_ids")),
        {"stop": ""},
        {"stop": []},
        {"model": ""},
        {"tools": []},
        *({name: None} for name in ("cache_salt", "skip_reading_prefix_cache", "skip_writing_prefix_cache")),
        {"skip_reading_prefix_cache": False, "skip_writing_prefix_cache": False},
        {"never_heard_of": {"a": [1]}},
    ],
    ids=str,
)
def test_a_neutral_value_changes_nothing(neutral):
    assert read({"prompt": "hi", **neutral}) == read({"prompt": "hi"})
    chat = {"messages": [USER]}
    assert read({**chat, **neutral}, Endpoint.CHAT) == read(chat, Endpoint.CHAT)


@pytest.mark.parametrize("salt", ["s", "\u00e9\U0001f511", " ", "x" * 1024])
@pytest.mark.parametrize(
    ("body", "endpoint"), [({"prompt": "x"}, Endpoint.COMPLETION), ({"messages": [USER]}, Endpoint.CHAT)]
)
def test_who_shares_blocks_and_what_a_request_may_do_with_them(body, endpoint, salt):
    options = read({**body, "cache_salt": salt, "skip_reading_prefix_cache": True}, endpoint).options
    assert (options.cache_salt, options.reads_cache, options.writes_cache) == (salt, False, True)
    options = read({**body, "skip_writing_prefix_cache": True}, endpoint).options
    assert (options.cache_salt, options.reads_cache, options.writes_cache) == (None, True, False)


@pytest.mark.parametrize("salt", ["", "x" * 1025, 7, True, ["s"], {}])
def test_a_salt_that_is_none_is_refused_and_not_repeated(salt):
    """An empty one is a mistake of the client: it believes that its blocks are its own."""
    message = refusal({"prompt": "x", "cache_salt": salt})
    assert message == "cache_salt: must be a string of 1 to 1024 characters; leave it out to share blocks"


@pytest.mark.parametrize("name", ["skip_reading_prefix_cache", "skip_writing_prefix_cache"])
def test_what_is_no_boolean_is_refused(name):
    assert refusal({"prompt": "x", name: "perhaps"}).startswith(f"{name}: ")


@pytest.mark.parametrize("name", ["cache_salt", "skip_writing_prefix_cache"])
def test_the_cache_fields_are_not_read_from_metadata_and_not_lost_there(name):
    assert refusal({"messages": [USER], "metadata": {name: "x"}}, Endpoint.CHAT).startswith("metadata: ")


@pytest.mark.parametrize(("prompt", "same"), [(["hi"], "hi"), ([[5, 6]], [5, 6])])
def test_a_list_of_one_prompt_is_that_prompt(prompt, same):
    assert read({"prompt": prompt}) == read({"prompt": same})


@pytest.mark.parametrize("prompt", [["a", "b"], [[1], [2]], [["a"]], [[]], [None], [[[1]]]])
def test_other_lists_are_no_prompt(prompt):
    assert refusal({"prompt": prompt}).startswith("prompt: must ")


@pytest.mark.parametrize("content", [None, "", []])
def test_no_content_is_an_empty_content(content):
    body = {"messages": [USER, {"role": "assistant", "content": content}]}
    assert read(body, Endpoint.CHAT).token_ids == tuple(
        load_tokenizer(None).apply_chat_template([USER, {"role": "assistant", "content": ""}])
    )


@pytest.mark.parametrize(
    ("body", "endpoint", "message"),
    [
        ({"prompt": "x", "stop_token_ids": [1] * 1025}, Endpoint.COMPLETION, "stop_token_ids: must have at most 1024"),
        ({"prompt": "x", "stop": ["a"] * 17}, Endpoint.COMPLETION, "stop: must be a string or a list of at most 16"),
        ({"prompt": "x", **{f"k{i}": 1 for i in range(256)}}, Endpoint.COMPLETION, "has 257 fields, at most 256"),
        ({"messages": [USER] * 8193}, Endpoint.CHAT, "messages: must have at most 8192 entries, got 8193"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 1025}]},
            Endpoint.CHAT,
            "messages.0.content: must be a string or a list of text and image parts, 1024 at most",
        ),
    ],
    ids=["stop_token_ids", "stop", "fields", "messages", "parts"],
)
def test_every_list_has_a_bound(body, endpoint, message):
    assert message in refusal(body, endpoint)


def test_parts_count_by_their_text():
    parts = [{"type": "text", "text": "x" * 50}] * 4
    body = {"messages": [{"role": "user", "content": parts}]}
    assert "messages: 204 tokens are too long for --max-model-len 200" in refusal(body, Endpoint.CHAT)


class Failing:
    image_token_id = None

    def encode(self, text):
        raise MemoryError


@pytest.mark.parametrize(
    ("raw", "tokenizer", "message"),
    [
        (b'{"prompt": "x"}', Failing(), "needs too much memory"),
        (b"[" * 10**6, None, "recursion limit exceeded"),
        (b'{"prompt": "\xff"}', None, "not valid JSON"),
        (b'{"prompt": "\\ud800"}', None, "not valid JSON"),
        (b'{"prompt": "x", "n": 7' + b"0" * 5000 + b"}", None, "not valid JSON"),
    ],
    ids=["memory", "depth", "utf-8", "surrogate", "digits"],
)
def test_what_cannot_be_read_is_one_line(raw, tokenizer, message):
    assert message in refusal(raw, tokenizer=tokenizer)


def test_an_answer_never_carries_half_a_character():
    ApiError(400, "half a \ud800 pair").body["error"]["message"].encode()
