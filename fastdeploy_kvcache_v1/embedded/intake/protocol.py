"""Request bodies of the OpenAI-compatible API. What is known to change the output but not implemented is refused."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, field_validator, model_validator

SEED_LIMIT = 2**63 - 1

MAX_FIELDS = 256
"""Of a request body, the unknown ones too."""

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 1024

MAX_MESSAGES = 8192
"""Twice a conversation of 2,000 turns."""

MAX_PARTS = 1024
"""Of one message."""

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "logprobs": (None, False, 0),
    "top_logprobs": (None, 0),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "tools": (None, []),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
    # Not OpenAI's, but FastDeploy and others have them.
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "repetition_penalty": (None, 1),
    "bad_words": (None, []),
    "bad_words_token_ids": (None, []),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "prompt_logprobs": (None, False),
    "include_stop_str_in_output": (None, False),
}
"""Parameters of OpenAI's API and its extensions with the values that ask for nothing this server cannot do."""


def _at_most(most: int) -> BeforeValidator:
    """Looks before pydantic does, which would check every entry first."""

    def check(value: object) -> object:
        if isinstance(value, list) and len(value) > most:
            raise ValueError(f"must have at most {most} entries, got {len(value)}")
        return value

    return BeforeValidator(check)


class StreamOptions(BaseModel):
    include_usage: bool = False


class GenerationBody(BaseModel):
    """What both endpoints share. A field that is null counts as not given. Fields unknown even to `UNSUPPORTED` are
    ignored, as clients send many. Every list has a bound, and the first error ends the check: the price of a request
    must not grow with what is wrong about it.
    """

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    model: str | None = None
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    seed: int | None = Field(default=None, ge=-SEED_LIMIT - 1, le=SEED_LIMIT)
    stop: tuple[str, ...] = ()
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: int | None = Field(default=None, ge=1)

    # Extensions, as other servers have them.
    min_tokens: int = Field(default=0, ge=0)
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[int], FailFast(), _at_most(MAX_STOP_TOKEN_IDS)] = Field(default_factory=list)
    return_token_ids: bool = False
    """Add `token_ids` to every choice."""

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
    def _refuse_unsupported(cls, body: object) -> object:
        if not isinstance(body, dict):
            return body
        if len(body) > MAX_FIELDS:
            raise ValueError(f"the request body has {len(body)} fields, at most {MAX_FIELDS} are read")
        for name, harmless in UNSUPPORTED.items():
            if body.get(name) not in harmless:
                raise ValueError(f"{name}={body[name]!r} is not supported by this server")
        return {name: value for name, value in body.items() if value is not None}

    @property
    def token_limit(self) -> int | None:
        """Output tokens the client asked for at most; None leaves it to the endpoint."""
        return self.max_tokens


class CompletionBody(GenerationBody):
    prompt: str | list[int]

    @field_validator("prompt", mode="plain")
    @classmethod
    def _check_prompt(cls, value: object) -> object:
        """One prompt, also as the only one of a list."""
        if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
            value = value[0]
        is_ids = isinstance(value, list) and all(type(token) is int for token in value)
        if not (isinstance(value, str) or is_ids):
            raise ValueError("must be one string or one list of token ids")
        if not value:
            raise ValueError("must not be empty")
        return value


class Message(BaseModel):
    role: str = Field(min_length=1)
    content: str

    @model_validator(mode="before")
    @classmethod
    def _refuse_calls(cls, message: object) -> object:
        """A conversation without the calls in it would be another one."""
        if isinstance(message, dict):
            for name in ("tool_calls", "function_call"):
                if message.get(name):
                    raise ValueError(f"{name} is not supported by this server")
        return message

    @field_validator("content", mode="plain")
    @classmethod
    def _join_content(cls, value: object) -> str:
        if value is None:
            return ""
        if isinstance(value, str):
            return value
        if not isinstance(value, list) or len(value) > MAX_PARTS:
            raise ValueError(f"must be a string or a list of text parts, {MAX_PARTS} at most")
        return "".join(_text_of(part) for part in value)

    def as_dict(self) -> dict[str, str]:
        return {"role": self.role, "content": self.content}


class ChatBody(GenerationBody):
    messages: Annotated[list[Message], FailFast(), _at_most(MAX_MESSAGES)] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


def _text_of(part: object) -> str:
    if isinstance(part, dict) and part.get("type") == "text":
        text = part.get("text")
        if isinstance(text, str):
            return text
    raise ValueError("must be a string or a list of text parts")
