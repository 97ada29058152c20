"""Request bodies of the OpenAI-compatible API, with FastDeploy's extensions: the fields that the server implements."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeGuard

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, field_validator, model_validator

from ...model.vision import Image
from ..api_error import ApiError
from .fields import refuse_fields_in_metadata, refuse_unsupported
from .images import ImageUrl

SEED_LIMIT = 2**63 - 1

MAX_FIELDS = 256
"""Of a request body, the unknown ones too."""

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 1024

MAX_USER_CHARACTERS = 256
"""Of a name that is longer, the rest is not looked at."""

MAX_SALT_CHARACTERS = 1024
"""Of `cache_salt`; 43 of base64 are 256 bits."""

MAX_MESSAGES = 8192
"""Twice a conversation of 2,000 turns."""

MAX_PARTS = 1024
"""Of one message."""


def _at_most(most: int) -> BeforeValidator:
    """Looks before pydantic does, which would check every entry first."""

    def check(value: object) -> object:
        if isinstance(value, list) and len(value) > most:
            raise ValueError(f"must have at most {most} entries, got {len(value)}")
        return value

    return BeforeValidator(check)


class StreamOptions(BaseModel):
    include_usage: bool | None = True
    continuous_usage_stats: bool | None = False


class GenerationBody(BaseModel):
    """What both endpoints share. A field that is null counts as not given. Unknown fields are ignored, as clients send
    many. Every list has a bound, and the first error ends the check: the price of a request must not grow with what is
    wrong about it.
    """

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    model: str | None = None
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int = Field(default=0, ge=-1)
    min_p: float = Field(default=0, ge=0, le=1)
    seed: int | None = Field(default=None, ge=-SEED_LIMIT - 1, le=SEED_LIMIT)
    stop: tuple[str, ...] = ()
    stream: bool = False
    stream_options: StreamOptions = StreamOptions(include_usage=False)
    max_tokens: int | None = Field(default=None, ge=1)

    # Extensions, as FastDeploy and other servers have them.
    prompt_token_ids: list[int] = Field(default_factory=list)
    """The prompt, whatever else says so; an empty list counts as not given."""
    min_tokens: int = Field(default=0, ge=0)
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[int], FailFast(), _at_most(MAX_STOP_TOKEN_IDS)] = Field(default_factory=list)
    return_token_ids: bool = False
    """Add the token ids of prompt and output to the answer."""

    cache_salt: str | None = None
    """Only requests with the same one find each other's blocks."""
    skip_reading_prefix_cache: bool = False
    skip_writing_prefix_cache: bool = False

    user: str | None = None
    """For a recorded trace; anything but a text counts as not given."""

    @field_validator("user", mode="plain")
    @classmethod
    def _take_user(cls, value: object) -> str | None:
        return value[:MAX_USER_CHARACTERS] if isinstance(value, str) and value else None

    @field_validator("cache_salt", mode="plain")
    @classmethod
    def _check_salt(cls, value: object) -> str:
        if isinstance(value, str) and 0 < len(value) <= MAX_SALT_CHARACTERS:
            return value
        raise ValueError(f"must be a string of 1 to {MAX_SALT_CHARACTERS} characters; leave it out to share blocks")

    @field_validator("prompt_token_ids", mode="plain")
    @classmethod
    def _check_prompt_token_ids(cls, value: object) -> list[int]:
        ids = _only_one(value)
        if _are_ids(ids):
            return ids
        raise ValueError("must be one list of token ids: send one request for each prompt")

    @field_validator("stop", mode="plain")
    @classmethod
    def _check_stop(cls, value: object) -> tuple[str, ...]:
        stops = ([value] if value else []) if isinstance(value, str) else value
        if not isinstance(stops, list) or len(stops) > MAX_STOPS:
            raise ValueError(f"must be a string or a list of at most {MAX_STOPS} strings")
        if not all(isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
            raise ValueError(f"every stop must be a string of 1 to {MAX_STOP_CHARACTERS} characters")
        return tuple(stops)

    @model_validator(mode="before")
    @classmethod
    def _take_given_fields(cls, body: object) -> object:
        if not isinstance(body, dict):
            return body
        if len(body) > MAX_FIELDS:
            raise ValueError(f"the request body has {len(body)} fields, at most {MAX_FIELDS} are read")
        refuse_unsupported(body)
        return {name: value for name, value in body.items() if value is not None}

    @property
    def token_limit(self) -> int | None:
        """Output tokens the client asked for at most; None leaves it to the endpoint."""
        return self.max_tokens


class CompletionBody(GenerationBody):
    prompt: str | list[int] | None = None

    @field_validator("prompt", mode="plain")
    @classmethod
    def _check_prompt(cls, value: object) -> str | list[int]:
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


class Message(BaseModel):
    role: str = Field(min_length=1)
    content: str | list[str | ImageUrl]
    """A text, or texts and images in their order."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_calls(cls, message: object) -> object:
        """A conversation without the calls in it would be another one."""
        if isinstance(message, dict):
            for name in ("tool_calls", "function_call"):
                if message.get(name):
                    raise ValueError(f"{name} is not supported by this server: send messages without calls")
        return message

    @field_validator("content", mode="plain")
    @classmethod
    def _join_content(cls, value: object) -> str | list[str | ImageUrl]:
        if value is None:
            return ""
        if isinstance(value, str):
            return value
        if not isinstance(value, list) or len(value) > MAX_PARTS:
            raise ValueError(f"must be a string or a list of text and image parts, {MAX_PARTS} at most")
        parts = [_text_or_image(part) for part in value]
        texts = [part for part in parts if isinstance(part, str)]
        return "".join(texts) if len(texts) == len(parts) else parts

    @property
    def image_urls(self) -> list[ImageUrl]:
        return [] if isinstance(self.content, str) else [part for part in self.content if isinstance(part, ImageUrl)]

    def as_dict(self, images: Iterator[Image]) -> dict[str, Any]:
        """With the number of placeholders of the next of `images` in place of each URL."""
        if isinstance(self.content, str):
            return {"role": self.role, "content": self.content}
        parts = [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "image", "num_tokens": next(images).num_tokens}
            for part in self.content
        ]
        return {"role": self.role, "content": parts}


class ChatBody(GenerationBody):
    messages: Annotated[list[Message], FailFast(), _at_most(MAX_MESSAGES)] = Field(default_factory=list)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    metadata: dict[str, Any] = Field(default_factory=dict)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    reasoning_effort: Literal["minimal", "low", "medium", "high"] | None = None

    @model_validator(mode="after")
    def _check_together(self) -> ChatBody:
        refuse_fields_in_metadata(self.metadata, type(self).model_fields)
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
    """The prompt of a list with a single one."""
    return value[0] if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list) else value


def _are_ids(value: object) -> TypeGuard[list[int]]:
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
