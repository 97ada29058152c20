"""Request fields that the server does not implement: which values it refuses, and which fields it may ignore.

Together with the fields of `protocol.py` these are all request fields of FastDeploy 2.5 and 2.6 and of OpenAI's API.
`docs/embedded-server.md` lists them for clients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..api_error import ApiError


class Refusal(NamedTuple):
    """A field that would change the answer."""

    neutral: tuple[Any, ...]
    """Values that ask for nothing; null always does."""
    advice: str
    """What the client can do instead."""


_ONE_ANSWER = "send one request for each answer"
_NO_LOGPROBS = "it reports no log-probabilities; leave the field out"
_NO_PENALTIES = "it has no penalties; leave the field out"
_NO_BANS = "it cannot ban words; leave the field out"
_NO_GUIDES = "it cannot constrain the output; leave the field out"
_NO_TOOLS = "it calls no tools; leave the field out"
_NO_BUDGETS = "it has one limit for the whole output; use max_tokens"
_NO_TEMPLATES = "it uses the model's chat template; send the prompt to /v1/completions"

REFUSED: dict[str, Refusal] = {
    "n": Refusal((1,), _ONE_ANSWER),
    "best_of": Refusal((1,), _ONE_ANSWER),
    "echo": Refusal((False,), "put the prompt before the answer yourself"),
    "suffix": Refusal(("", {}), "it only continues a prompt; leave the field out"),
    "logprobs": Refusal((False, 0), _NO_LOGPROBS),
    "top_logprobs": Refusal((0,), _NO_LOGPROBS),
    "prompt_logprobs": Refusal((False,), _NO_LOGPROBS),
    "logit_bias": Refusal(({},), "it cannot shift logits; leave the field out"),
    "logits_processors_args": Refusal(({},), "it has no logits processors; leave the field out"),
    "presence_penalty": Refusal((0,), _NO_PENALTIES),
    "frequency_penalty": Refusal((0,), _NO_PENALTIES),
    "repetition_penalty": Refusal((1,), _NO_PENALTIES),
    "bad_words": Refusal(([],), _NO_BANS),
    "bad_words_token_ids": Refusal(([],), _NO_BANS),
    "include_stop_str_in_output": Refusal(
        (False,), "it cuts the text before the stop; append the stop string yourself"
    ),
    "response_format": Refusal(({"type": "text"},), _NO_GUIDES),
    "guided_json": Refusal((), _NO_GUIDES),
    "guided_regex": Refusal((), _NO_GUIDES),
    "guided_choice": Refusal((), _NO_GUIDES),
    "guided_grammar": Refusal((), _NO_GUIDES),
    "structural_tag": Refusal((), _NO_GUIDES),
    "tools": Refusal(([],), _NO_TOOLS),
    "functions": Refusal(([],), _NO_TOOLS),
    "chat_template": Refusal((), _NO_TEMPLATES),
    "disable_chat_template": Refusal((False,), _NO_TEMPLATES),
    "completion_token_ids": Refusal(([],), "append them to prompt_token_ids"),
    "reasoning_max_tokens": Refusal((), _NO_BUDGETS),
    "response_max_tokens": Refusal((), _NO_BUDGETS),
    "disaggregate_info": Refusal(({},), "it runs prefill and decode in one place; leave the field out"),
}

IGNORED = frozenset(
    {
        "request_id",
        "trace_context",
        "collect_metrics",
        "max_streaming_response_tokens",
        "include_draft_logprobs",
        "include_logprobs_decode_token",
        "temp_scaled_logprobs",
        "top_p_normalized_logprobs",
        "mm_hashes",
        "video_fps",
    }
)
"""Fields of FastDeploy that change no token here. Unknown fields are ignored as well."""


def refuse_unsupported(body: Mapping[str, Any]) -> None:
    """Raises `ApiError` for the first field of `body` that would change the answer and is not implemented."""
    for name, (neutral, advice) in REFUSED.items():
        value = body.get(name)
        if value is not None and value not in neutral:
            raise ApiError(400, f"{name}={value!r} is not supported by this server: {advice}", name)


def refuse_fields_in_metadata(metadata: Mapping[str, Any], accepted: Mapping[str, Any]) -> None:
    """FastDeploy takes request fields out of `metadata` too; OpenAI's API attaches no meaning to it.

    Raises `ApiError` for a name that is a request field, `accepted` or refused: to ignore it could change the answer.
    """
    for name in metadata:
        if name in accepted or name in REFUSED or name == "enable_thinking":
            place = "into chat_template_kwargs" if name == "enable_thinking" else "out of metadata, beside messages"
            raise ApiError(400, f"metadata: this server reads no request fields in it: move {name} {place}", "metadata")
