"""Request bodies of the OpenAI-compatible API, with FastDeploy's extensions.

A field is declared here, and its effect on sampler, cache and engine stands here, too. docs/lab/server.md lists all.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import islice
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, WithJsonSchema, field_validator, model_validator

from ...contract.messages import CacheAccess
from ...contract.sessions import (
    LAST_TURN,
    MAX_ID_CHARACTERS,
    MAX_RETURN_S,
    SessionHint,
    checked_return,
    checked_session_id,
    session_hint,
)
from ..model.sampler import SamplingParams
from .api_error import ApiError
from .engine.generation import GenerationRequest
from .field_names import IGNORED, MAX_FIELDS, UnknownField, unknown_fields

SEED_LIMIT = 2**63 - 1

_REFUSED_BY_ADVICE: dict[str, dict[str, tuple[Any, ...]]] = {
    "send one request for each answer": {"n": (1,), "best_of": (1,)},
    "put the prompt before the answer yourself": {"echo": (False,)},
    "it only continues a prompt; leave the field out": {"suffix": ("", {})},
    "it reports no log-probabilities; leave the field out": {
        "logprobs": (False, 0),
        "top_logprobs": (0,),
        "prompt_logprobs": (False,),
    },
    "it cannot shift logits; leave the field out": {"logit_bias": ({},)},
    "it has no logits processors; leave the field out": {"logits_processors_args": ({},)},
    "it has no penalties; leave the field out": {
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "repetition_penalty": (1,),
    },
    "it cannot ban words; leave the field out": {"bad_words": ([],), "bad_words_token_ids": ([],)},
    "it cuts the text before the stop; append the stop string yourself": {"include_stop_str_in_output": (False,)},
    "it cannot constrain the output; leave the field out": {
        "response_format": ({"type": "text"},),
        **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag"), ()),
    },
    "it calls no tools; leave the field out": {"tools": ([],), "functions": ([],), "web_search_options": ()},
    "it answers with text only; leave the field out": {"modalities": (["text"],), "audio": ()},
    "it cannot steer the length; use max_tokens": {"verbosity": ("medium",)},
    "it uses the model's chat template; send the prompt to /v1/completions": {
        "chat_template": (),
        "disable_chat_template": (False,),
    },
    "append them to prompt_token_ids": {"completion_token_ids": ([],)},
    "it has one limit for the whole output; use max_tokens": {"reasoning_max_tokens": (), "response_max_tokens": ()},
    "it runs prefill and decode in one place; leave the field out": {"disaggregate_info": ({},)},
}
REFUSED = {name: (neutral, advice) for advice, names in _REFUSED_BY_ADVICE.items() for name, neutral in names.items()}
"""Fields that would change the answer: values that change nothing (null besides), and advice for the client."""


class StreamOptions(BaseModel):
    include_usage: bool | None = True
    continuous_usage_stats: bool | None = False


HINTS = frozenset({"session_id", "return_in_s", "prompt_cache_key", "user"})
"""Fields that change no answer."""


class Body(BaseModel):
    """A field that is null counts as not given."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, use_attribute_docstrings=True)

    cache_salt: str = Field(default="", min_length=1, max_length=1024)
    """Only requests with the same salt share cached blocks."""
    session_id: str | None = Field(default=None, min_length=1, max_length=MAX_ID_CHARACTERS)
    """The conversation or agent that sends the request. Without it, header `X-Session-ID`, `prompt_cache_key` or
    `user`. It decides what is evicted first, and names the session in a recorded trace.
    """
    return_in_s: float | None = Field(default=None, ge=LAST_TURN, le=MAX_RETURN_S)
    """Seconds from the end of this answer to the next request of its session; -1: it was the last one. A hint for
    eviction, also without a session's name.
    """

    _unknown: tuple[UnknownField, ...] = PrivateAttr(default=())

    @property
    def unknown(self) -> tuple[UnknownField, ...]:
        """The first `MAX_FIELDS` fields that this endpoint does not know."""
        return self._unknown

    _session_id = field_validator("session_id", mode="before")(checked_session_id)
    _return_in_s = field_validator("return_in_s", mode="before")(checked_return)

    @property
    def session(self) -> SessionHint:
        return session_hint(self.session_id, self.cache_salt.encode(), self.return_in_s)

    @model_validator(mode="wrap")
    @classmethod
    def _keep_unknown_names(cls, body: Any, handler: Callable[[Any], Any]) -> Any:
        made = handler(body)
        if isinstance(body, dict):
            known = {*cls.model_fields, *REFUSED, *IGNORED}
            made._unknown = tuple(islice(unknown_fields(body, known), MAX_FIELDS))
        return made

    @model_validator(mode="before")
    @classmethod
    def _take_given_fields(cls, body: object) -> object:
        if not isinstance(body, dict):
            return body
        for name, (neutral, advice) in REFUSED.items():
            value = body.get(name)
            if value is not None and value not in neutral:
                raise ApiError(400, f"{name}={value!r} is not supported by this server: {advice}", name)
        return {name: value for name, value in body.items() if value is not None}


class SessionBody(Body):
    """When a session sends its next request, counted from now."""

    session_id: str
    return_in_s: float


Texts = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}


class GenerationBody(Body):
    """Fields of both endpoints."""

    model: str | None = None
    """Any name without `--served-model-name`. With it, that name or `default`."""
    temperature: float = Field(default=1.0, ge=0)
    """0 is greedy. FastDeploy's default is the model's."""
    top_p: float = Field(default=1.0, ge=0, le=1)
    """FastDeploy's default is the model's, else 0.7."""
    top_k: int = Field(default=0, ge=-1)
    """0 and -1 take all tokens."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """0 takes all tokens."""
    seed: int | None = Field(default=None, ge=-SEED_LIMIT - 1, le=SEED_LIMIT)
    """Any 64-bit integer, random by default. Other tokens than FastDeploy's, unless greedy."""
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], WithJsonSchema(Texts)] = Field(default_factory=list)
    """The text ends before the first of these strings. FastDeploy takes five of up to eight tokens."""
    stream: bool = False
    stream_options: StreamOptions = StreamOptions(include_usage=False)
    """If given, `include_usage` is true by default."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Output tokens at most. Completions without it get 16, chats what model and device tier have room for."""

    # Extensions, as in FastDeploy and other servers.
    prompt_token_ids: list[int] = Field(default_factory=list)
    """Takes the place of prompt or messages, unless it is empty."""
    min_tokens: int = Field(default=0, ge=0)
    """Before so many output tokens the model cannot end, and stops are ignored."""
    ignore_eos: bool = False
    """End tokens do not end the output. Unknown to FastDeploy."""
    stop_token_ids: list[int] = Field(default_factory=list)
    return_token_ids: bool = False
    cache_report: bool = False
    """`usage.prompt_tokens_details` says why the prompt's first token without a hit was missed: `reason`, `at_token`,
    `tier_last_held`, `evicted_s_ago`, `blocks_short`. Unknown to FastDeploy.
    """
    """Add `prompt_token_ids` and `completion_token_ids` to choice, message or delta, and `token_ids` to the choice."""

    skip_reading_prefix_cache: bool = False
    """Compute every token of the prompt."""
    skip_writing_prefix_cache: bool = False
    """Cache and store no block of this request."""
    disable_prefix_caching: bool = False
    """Skip both reading and writing."""

    prompt_cache_key: str | None = None
    """The session's name in OpenAI's API."""
    user: str | None = None
    """The session's name where nothing else gives one. Not part of the answer's `id`, as with FastDeploy."""

    @field_validator("stop", mode="before")
    @classmethod
    def _take_one_stop(cls, value: object) -> object:
        return ([value] if value else []) if isinstance(value, str) else value

    @field_validator("prompt_token_ids", mode="wrap")  # not `plain`: /openapi.json then has no type
    @classmethod
    def _check_prompt_token_ids(cls, value: object, _: object) -> object:
        ids = _only_one(value)
        if _are_ids(ids):
            return ids
        raise ValueError("must be one list of token ids: send one request for each prompt")

    @property
    def token_limit(self) -> int | None:
        """The client's limit of output tokens, or None."""
        return self.max_tokens

    @property
    def access(self) -> CacheAccess:
        reads, writes = not self.skip_reading_prefix_cache, not self.skip_writing_prefix_cache
        uses = not self.disable_prefix_caching
        return CacheAccess(reads and uses, writes and uses)

    def sampling(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=random.getrandbits(63) if self.seed is None else self.seed,  # drawn once, so that a retry repeats it
        )

    def request(self, **read: Any) -> GenerationRequest:
        """The engine's request. `read`: fields that depend on model and prompt."""
        return GenerationRequest(
            min_tokens=self.min_tokens, cache_salt=self.cache_salt, cache_report=self.cache_report, **read
        )


class CompletionBody(GenerationBody):
    prompt: str | list[int] | None = None
    """A text or token ids, or a list of one such prompt. FastDeploy takes several."""

    @field_validator("prompt", mode="wrap")
    @classmethod
    def _check_prompt(cls, value: object, _: object) -> object:
        prompt = _only_one(value)
        if isinstance(prompt, str) or _are_ids(prompt):
            return prompt
        raise ValueError("must be one string or one list of token ids: send one request for each prompt")

    @model_validator(mode="after")
    def _require_prompt(self) -> CompletionBody:
        if not self.prompt and not self.prompt_token_ids:
            fault = "the field is missing" if self.prompt is None else "must not be empty"
            raise ApiError(400, f"prompt: {fault}: send a string or a list of token ids", "prompt")
        return self


class ImageUrl(NamedTuple):
    """A part of a message."""

    url: object
    """Unchecked."""


Parts = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}


class Message(BaseModel):
    role: str = Field(min_length=1)
    content: Annotated[str | list[str | ImageUrl], WithJsonSchema(Parts)]
    """A text, or texts and images in their order."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_calls(cls, message: object) -> object:
        if isinstance(message, dict):
            for name in ("tool_calls", "function_call"):
                if message.get(name):
                    raise ValueError(f"{name} is not supported by this server: send messages without calls")
        return message

    @field_validator("content", mode="wrap")
    @classmethod
    def _join_content(cls, value: object, _: object) -> object:
        if value is None:
            return ""
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise ValueError("must be a string or a list of text and image parts")
        parts = [_text_or_image(part) for part in value]
        texts = [part for part in parts if isinstance(part, str)]
        return "".join(texts) if len(texts) == len(parts) else parts


class ChatBody(GenerationBody):
    messages: list[Message] = Field(default_factory=list)
    """Text, and images for the random model. No tool calls."""
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """Wins over `max_tokens`."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """Ignored. A request field in it that could change the answer is refused, because FastDeploy reads it there."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the model's chat template, `enable_thinking` for example."""
    reasoning_effort: Literal["minimal", "low", "medium", "high"] | None = None

    @model_validator(mode="after")
    def _check_together(self) -> ChatBody:
        for name in self.metadata:  # FastDeploy reads request fields there: ignoring one could change the answer
            if name in type(self).model_fields.keys() - HINTS or name in REFUSED or name == "enable_thinking":
                place = "into chat_template_kwargs" if name == "enable_thinking" else "out of metadata, beside messages"
                fault = "this server reads no request fields in it"
                raise ApiError(400, f"metadata: {fault}: move {name} {place}", "metadata")
        if not self.messages and not self.prompt_token_ids:
            raise ApiError(400, "messages: there must be at least 1 item", "messages")
        return self

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def template_variables(self) -> dict[str, Any]:
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {**self.chat_template_kwargs, **effort}


def _only_one(value: object) -> object:
    """The only prompt of a list of one, else `value`."""
    return value[0] if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list) else value


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)


def _text_or_image(part: object) -> str | ImageUrl:
    if isinstance(part, dict) and part.get("type") == "text":
        text = part.get("text")
        if isinstance(text, str):
            return text
    if isinstance(part, dict) and part.get("type") == "image_url":
        image = part.get("image_url")
        return ImageUrl(image.get("url") if isinstance(image, dict) else image)
    raise ValueError("must be a string or a list of text and image parts")
