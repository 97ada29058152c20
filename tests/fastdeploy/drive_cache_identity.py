"""Run inside a FastDeploy process: cache fields, from the body of the API to the hashes of the engine."""

import json
import pickle

from fastdeploy_kvcache_v1 import plugin

plugin.activate()

from pydantic import ValidationError  # noqa: E402

from fastdeploy.engine.request import Request  # noqa: E402
from fastdeploy.entrypoints.openai.protocol import (  # noqa: E402
    BatchRequestInput,
    ChatCompletionRequest,
    CompletionRequest,
)
from fastdeploy_kvcache_v1.fastdeploy_integration.cache_identity import FIELDS  # noqa: E402
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.task_tokens import TaskTokens  # noqa: E402
from fastdeploy_kvcache_v1.fastdeploy_integration.transport import ROWS_ATTRIBUTE, SWAP_ATTRIBUTE  # noqa: E402

TOKENS = list(range(10))
MESSAGES = [{"role": "user", "content": "x"}]
BODIES = {
    "completion": (CompletionRequest, {"prompt": TOKENS}),
    "chat": (ChatCompletionRequest, {"messages": MESSAGES}),
}


def show(case, request):
    tokens = TaskTokens(request, 4)
    names = ["none"] if not tokens.hashes else [tokens.hashes[-1].hex()[:12]]
    print("CASE", case, *names, *map(int, tokens.access))


def engine_request(body):
    """As the API server sends it, and the engine reads it."""
    prompt = () if isinstance(body, ChatCompletionRequest) else (TOKENS,)
    sent = body.to_dict_for_infer("r_0", *prompt)
    sent.update(prompt_token_ids=TOKENS, messages=None)
    return Request.from_dict(json.loads(json.dumps(sent)))


def bodies():
    for kind, (model, given) in BODIES.items():
        for case, more in {
            "plain": {},
            "null": dict.fromkeys(FIELDS),
            "salted": {"cache_salt": "s"},
            "other": {"cache_salt": "t"},
            "no-reads": {"skip_reading_prefix_cache": True},
            "no-writes": {"skip_writing_prefix_cache": True, "skip_reading_prefix_cache": False},
        }.items():
            show(f"{kind}/{case}", engine_request(model.model_validate({**given, **more})))
        for wrong in (*({"cache_salt": salt} for salt in ("", 7, "x" * 1025)), {"skip_reading_prefix_cache": "?"}):
            try:
                model.model_validate({**given, **wrong})
            except ValidationError as error:
                print("REFUSED", kind, error.errors()[0]["loc"][0])
            else:
                print("ACCEPTED", kind, wrong)


def other_ways():
    """Ways around the model of the API: obsolete ones, a request that is copied, sent, or made by other classes."""
    show("metadata/salted", engine_request(ChatCompletionRequest(messages=MESSAGES, metadata={"cache_salt": "s"})))
    show("metadata/wrong", engine_request(ChatCompletionRequest(messages=MESSAGES, metadata={"cache_salt": 7})))
    show("suffix/salted", engine_request(CompletionRequest(prompt=TOKENS, suffix={"cache_salt": "s"})))
    salted = engine_request(CompletionRequest(prompt=TOKENS, cache_salt="s", skip_writing_prefix_cache=True))
    show("pickle/salted", pickle.loads(pickle.dumps(salted)))
    show("dict/salted", Request.from_dict(salted.to_dict()))
    assert not FIELDS & engine_request(CompletionRequest(prompt=TOKENS)).to_dict().keys()
    made = Request.from_generic_request(CompletionRequest(prompt=TOKENS, cache_salt="s"), request_id="r_0")
    made.prompt_token_ids = TOKENS
    show("object/salted", made)
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions"}
    line["body"] = {"messages": MESSAGES, "cache_salt": "s"}
    show("batch/salted", engine_request(BatchRequestInput.model_validate(line).body))


def forged(body):
    """A request with what only the engine may attach in its `body`, as the worker gets it."""
    request = pickle.loads(pickle.dumps(Request.from_generic_request(body, request_id="r_0")))
    names = (SWAP_ATTRIBUTE, ROWS_ATTRIBUTE)
    assert request.other == 1, "the host takes metadata over: else this shows nothing"
    print("FORGED", type(body).__name__, *(name for name in names if hasattr(request, name)))


def forgeries():
    for value in ("x", [2, 0, -1, []], [[0, 1]], {"x": 1}, 7, None, True):
        metadata = {SWAP_ATTRIBUTE: value, ROWS_ATTRIBUTE: value, "other": 1}
        forged(ChatCompletionRequest(messages=MESSAGES, metadata=metadata))
        forged(CompletionRequest(prompt=TOKENS, suffix=metadata))


FIELDS = frozenset(FIELDS)
bodies()
other_ways()
forgeries()
