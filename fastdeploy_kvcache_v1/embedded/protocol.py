"""Request bodies of the OpenAI-compatible API. What is known to change the output but not implemented is refused."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

MAX_STOPS = 16
SEED_LIMIT = 2**63 - 1

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


class StreamOptions(BaseModel):
    include_usage: bool = False


class GenerationBody(BaseModel):
    """What both endpoints share. Fields unknown even to `UNSUPPORTED` are ignored, as clients send many."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    model: str | None = None
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    seed: int | None = Field(default=None, ge=-SEED_LIMIT - 1, le=SEED_LIMIT)
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1)

    # Extensions, as other servers have them.
    min_tokens: int = Field(default=0, ge=0)
    ignore_eos: bool = False
    stop_token_ids: list[int] = Field(default_factory=list)
    return_token_ids: bool = False
    """Add `token_ids` to every choice."""

    @field_validator("stop", mode="before")
    @classmethod
    def _check_stop(cls, value: object) -> object:
        stops = [value] if isinstance(value, str) else value
        if stops is not None and not (
            isinstance(stops, list)
            and len(stops) <= MAX_STOPS
            and all(isinstance(stop, str) and stop for stop in stops)
        ):
            raise ValueError(f"must be a non-empty string or a list of at most {MAX_STOPS} of them")
        return stops

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, body: object) -> object:
        if isinstance(body, dict):
            for name, harmless in UNSUPPORTED.items():
                if body.get(name) not in harmless:
                    raise ValueError(f"{name}={body[name]!r} is not supported by this server")
        return body

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def token_limit(self) -> int | None:
        """Output tokens the client asked for at most; None leaves it to the endpoint."""
        return self.max_tokens

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(GenerationBody):
    prompt: str | list[int]

    @field_validator("prompt", mode="before")
    @classmethod
    def _check_prompt(cls, value: object) -> object:
        is_ids = isinstance(value, list) and all(type(token) is int for token in value)
        if not (isinstance(value, str) or is_ids):
            raise ValueError("must be one string or one list of token ids")
        if not value:
            raise ValueError("must not be empty")
        return value


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class Message(BaseModel):
    role: str = Field(min_length=1)
    content: str | list[TextPart]

    @model_validator(mode="before")
    @classmethod
    def _refuse_calls(cls, message: object) -> object:
        """A conversation without the calls in it would be another one."""
        if isinstance(message, dict):
            for name in ("tool_calls", "function_call"):
                if message.get(name):
                    raise ValueError(f"{name} is not supported by this server")
        return message

    @field_validator("content", mode="before")
    @classmethod
    def _check_content(cls, value: object) -> object:
        if isinstance(value, str):
            return value
        if isinstance(value, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in value):
            return value
        raise ValueError("must be a string or a list of text parts")

    def as_dict(self) -> dict[str, str]:
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": text}


class ChatBody(GenerationBody):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
