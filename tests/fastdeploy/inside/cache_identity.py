"""Cache fields reach the hashes through FastDeploy's own API models and requests, whichever way a request takes."""

import json
import pickle

import pytest

import fastdeploy  # noqa: F401  (first: its modules import each other in a circle)
from fastdeploy.engine.request import Request
from fastdeploy.entrypoints.openai.protocol import BatchRequestInput, ChatCompletionRequest, CompletionRequest
from fastdeploy_kvcache_v1.contract.messages import CacheAccess
from fastdeploy_kvcache_v1.contract.sessions import UNTOLD, session_hint
from fastdeploy_kvcache_v1.fastdeploy_integration.cache_identity import FIELDS, NAMES
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.task_tokens import TaskTokens
from fastdeploy_kvcache_v1.fastdeploy_integration.transport import ROWS_ATTRIBUTE, SWAP_ATTRIBUTE
from fastdeploy_kvcache_v1.scheduler.block_hashing import BlockHasher

TOKENS = list(range(10))
MESSAGES = [{"role": "user", "content": "x"}]
BODIES = {
    "completion": (CompletionRequest, {"prompt": TOKENS}),
    "chat": (ChatCompletionRequest, {"messages": MESSAGES}),
}
both = pytest.mark.parametrize(("model", "given"), BODIES.values(), ids=BODIES)
ALL = CacheAccess()


def identity(request):
    """The name of the last whole block, and what the request may do."""
    tokens = TaskTokens(request, 4)
    return (tokens.hashes[-1] if tokens.hashes else None), tokens.access


def name(salt=b""):
    hasher = BlockHasher(4, salt=salt)
    hasher.extend(TOKENS)
    return hasher.hashes[-1]


def engine_request(body):
    """As the API server sends it, and the engine reads it."""
    prompt = () if isinstance(body, ChatCompletionRequest) else (TOKENS,)
    sent = body.to_dict_for_infer("r_0", *prompt)
    sent.update(prompt_token_ids=TOKENS, messages=None)
    return Request.from_dict(json.loads(json.dumps(sent)))


@both
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (name(), ALL)),
        (dict.fromkeys(FIELDS), (name(), ALL)),
        ({"cache_salt": "s"}, (name(b"s"), ALL)),
        ({"cache_salt": "t"}, (name(b"t"), ALL)),
        ({"skip_reading_prefix_cache": True}, (name(), CacheAccess(reads=False))),
        ({"skip_writing_prefix_cache": True, "skip_reading_prefix_cache": False}, (name(), CacheAccess(writes=False))),
        ({"disable_prefix_caching": True}, (name(), CacheAccess(reads=False, writes=False))),
        ({"disable_prefix_caching": False}, (name(), ALL)),
    ],
)
def test_what_a_request_of_both_endpoints_asks_is_done(model, given, fields, expected):
    assert identity(engine_request(model.model_validate({**given, **fields}))) == expected


@both
def test_every_field_arrives_with_its_value(model, given):
    sent = {name: kind(1) for name, kind in FIELDS.items()}
    request = engine_request(model.model_validate({**given, **sent}))
    assert {name: getattr(request, name) for name in FIELDS} == sent


def session(request):
    return TaskTokens(request, 4).session


@both
@pytest.mark.parametrize("name", NAMES)
def test_session_and_time_of_return_arrive_also_over_to_dict(model, given, name):
    request = engine_request(model.model_validate({**given, name: "a", "cache_salt": "s", "return_in_s": -1}))
    for each in (request, Request.from_dict(request.to_dict())):
        assert session(each) == session_hint("a", b"s", -1)
    assert session(engine_request(model.model_validate(given))) == UNTOLD


def test_wrong_hint_in_metadata_costs_the_hint_alone():
    wrong = {"session_id": 7, "user": {"a": 1}, "return_in_s": "soon"}
    request = engine_request(ChatCompletionRequest(messages=MESSAGES, metadata=wrong))
    assert (session(request), identity(request)) == (UNTOLD, (name(), ALL))


def copied_object():
    made = Request.from_generic_request(CompletionRequest(prompt=TOKENS, cache_salt="s"), request_id="r_0")
    made.prompt_token_ids = TOKENS
    return made


def line_of_a_batch():
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions"}
    line["body"] = {"messages": MESSAGES, "cache_salt": "s"}
    return engine_request(BatchRequestInput.model_validate(line).body)


def salted():
    return engine_request(CompletionRequest(prompt=TOKENS, cache_salt="s", skip_writing_prefix_cache=True))


@pytest.mark.parametrize(
    ("way", "access"),
    {
        "metadata": (
            lambda: engine_request(ChatCompletionRequest(messages=MESSAGES, metadata={"cache_salt": "s"})),
            ALL,
        ),
        "suffix": (lambda: engine_request(CompletionRequest(prompt=TOKENS, suffix={"cache_salt": "s"})), ALL),
        "object": (copied_object, ALL),
        "batch": (line_of_a_batch, ALL),
        "pickle": (lambda: pickle.loads(pickle.dumps(salted())), CacheAccess(writes=False)),
        "dict": (lambda: Request.from_dict(salted().to_dict()), CacheAccess(writes=False)),
    }.values(),
)
def test_no_other_way_loses_the_salt(way, access):
    """Ways around the model of the API: obsolete ones, a request that is copied, sent, or made by other classes."""
    assert identity(way()) == (name(b"s"), access)


def test_a_request_without_the_fields_sends_none():
    assert not set(FIELDS) & engine_request(CompletionRequest(prompt=TOKENS)).to_dict().keys()


@pytest.mark.parametrize("value", ["x", [2, 0, -1, []], [[0, 1]], {"x": 1}, 7, None, True])
@pytest.mark.parametrize("kind", BODIES)
def test_no_body_puts_anything_on_a_request_that_the_engine_attaches(kind, value):
    """As the worker gets it."""
    given = {SWAP_ATTRIBUTE: value, ROWS_ATTRIBUTE: value, "other": 1}
    if kind == "chat":
        body = ChatCompletionRequest(messages=MESSAGES, metadata=given)
    else:
        body = CompletionRequest(prompt=TOKENS, suffix=given)
    request = pickle.loads(pickle.dumps(Request.from_generic_request(body, request_id="r_0")))
    assert request.other == 1, "the host takes metadata over: else this shows nothing"
    assert not hasattr(request, SWAP_ATTRIBUTE)
    assert not hasattr(request, ROWS_ATTRIBUTE)
