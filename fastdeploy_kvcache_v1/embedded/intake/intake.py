"""From the body of a request to tokens: JSON, checks, chat template, tokenizer.

Runs on the event loop for small bodies, and for the others in the intake process, where it may take its time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

from ...model.vision import Image, PlacedImage
from ..api_error import ApiError, describe_validation
from ..text import Tokenizer
from .images import MAX_IMAGES, ImagesLeftError, read_image
from .protocol import ChatBody, CompletionBody, GenerationBody

COMPLETION_MAX_TOKENS = 16
"""Default of /v1/completions, as OpenAI has it; chats run up to the limit of model and cache."""

ANY_MODEL = "default"
"""A client that names this model means the one that is served, as with FastDeploy."""


class Endpoint(Enum):
    COMPLETION = "prompt"
    CHAT = "messages"

    @property
    def param(self) -> str:
        """The field that holds the prompt."""
        return self.value


@dataclass(frozen=True)
class IntakeConfig:
    """What a request is checked against."""

    model_path: Path | None
    served_model_name: str
    vocab_size: int
    max_model_len: int
    num_device_blocks: int
    block_size: int
    max_request_mib: float
    checks_model_name: bool = False


@dataclass(frozen=True)
class Options:
    """What a request asks for, beside its prompt. Values that were not given are None or the API's defaults."""

    max_tokens: int
    temperature: float | None
    top_p: float | None
    top_k: int
    min_p: float
    seed: int | None
    stops: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    min_tokens: int
    ignore_eos: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    session: str | None = None
    """What the client calls its user."""
    cache_salt: str | None = None
    reads_cache: bool = True
    writes_cache: bool = True


@dataclass(frozen=True)
class Reading:
    """A request that fits model and cache."""

    token_ids: tuple[int, ...]
    options: Options
    images: tuple[PlacedImage, ...] = ()
    """In the order of their placeholders in `token_ids`."""


class Intake:
    """Reads bodies. Stateless apart from the tokenizer."""

    def __init__(self, config: IntakeConfig, tokenizer: Tokenizer, *, decodes_images: bool = True) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._decodes_images = decodes_images

    def read(self, endpoint: Endpoint, raw: bytes | bytearray) -> Reading:
        """Raises `ApiError`, one line, for whatever is wrong with the request, and `ImagesLeftError`."""
        try:
            body = _validated(CompletionBody if endpoint is Endpoint.COMPLETION else ChatBody, raw)
            if self._config.checks_model_name and body.model:
                check_model(body.model, self._config.served_model_name)
            images = self._images(body)
            token_ids = self._token_ids(body, images)
        except MemoryError:
            raise ApiError(400, "reading this request needs too much memory: shorten it") from None
        max_tokens = self._max_tokens(len(token_ids), body.token_limit, endpoint)
        return Reading(tuple(token_ids), _options(body, max_tokens), self._placed(token_ids, images))

    def _images(self, body: GenerationBody) -> list[Image]:
        """Raises `ApiError` for images that cannot be seen, or are none."""
        if not isinstance(body, ChatBody) or body.prompt_token_ids:
            return []
        urls = [url for message in body.messages for url in message.image_urls]
        if not urls:
            return []
        param = Endpoint.CHAT.param
        if self._tokenizer.image_token_id is None:
            raise ApiError(400, f"{param}: this model sees no images: send text only", param)
        if len(urls) > MAX_IMAGES:
            raise ApiError(400, f"{param}: {len(urls)} images, at most {MAX_IMAGES} are read", param)
        if not self._decodes_images:
            raise ImagesLeftError
        try:
            return [read_image(each.url) for each in urls]
        except ValueError as error:
            raise ApiError(400, f"{param}: {error}", param) from None

    def _placed(self, token_ids: list[int], images: list[Image]) -> tuple[PlacedImage, ...]:
        """Placeholders belong to the images, in their order. Raises `ApiError` where the text has some of its own."""
        if not images:
            return ()
        places = [index for index, token in enumerate(token_ids) if token == self._tokenizer.image_token_id]
        if len(places) != sum(image.num_tokens for image in images):
            placeholder = self._tokenizer.image_token
            raise ApiError(400, f"messages: a text beside images must not hold {placeholder}", "messages")
        placed, first = [], 0
        for image in images:
            placed.append(PlacedImage(places[first], image))
            first += image.num_tokens
        return tuple(placed)

    def _token_ids(self, body: GenerationBody, images: list[Image]) -> list[int]:
        if body.prompt_token_ids:
            return self._known_ids(body.prompt_token_ids, "prompt_token_ids")
        try:
            if isinstance(body, ChatBody):
                left = iter(images)
                messages = [message.as_dict(left) for message in body.messages]
                return self._tokenizer.apply_chat_template(messages, body.template_variables)
            assert isinstance(body, CompletionBody), "an endpoint has a body of its own"
            if isinstance(body.prompt, str):
                return self._tokenizer.encode(body.prompt)
        except ValueError as error:  # templates refuse role orders they do not know
            raise ApiError(400, f"messages: {error}", "messages") from None
        assert isinstance(body.prompt, list), "a completion without prompt_token_ids has a prompt"
        return self._known_ids(body.prompt, "prompt")

    def _known_ids(self, token_ids: list[int], param: str) -> list[int]:
        vocab_size = self._config.vocab_size
        if min(token_ids) < 0 or max(token_ids) >= vocab_size:
            raise ApiError(400, f"{param}: token ids must lie in 0..{vocab_size - 1}", param)
        return token_ids

    def _max_tokens(self, num_prompt: int, asked: int | None, endpoint: Endpoint) -> int:
        """Output limit; what the model has no positions for is cut off, as FastDeploy does.

        Raises `ApiError` for a request that could never run, before anything is queued.
        """
        config, param = self._config, endpoint.param
        if not num_prompt:
            raise ApiError(400, f"{param}: must not be empty", param)
        model_room = config.max_model_len - num_prompt
        if model_room < 1:
            raise self._too_long(param, f"{num_prompt} tokens")
        # The last sampled token's KV is never written, so the blocks carry one token more.
        cache_room = config.num_device_blocks * config.block_size - num_prompt + 1
        if asked is None:
            default = COMPLETION_MAX_TOKENS if endpoint is Endpoint.COMPLETION else model_room
            asked = min(default, max(cache_room, 1))
        num_outputs = min(asked, model_room)
        if num_outputs > cache_room:
            message = (
                f"{num_prompt} prompt tokens and {num_outputs} output tokens do not fit the device tier's "
                f"{config.num_device_blocks} blocks of {config.block_size} tokens: lower max_tokens"
            )
            raise ApiError(400, message, "max_tokens", "context_length_exceeded")
        return num_outputs

    def _too_long(self, param: str, size: str) -> ApiError:
        message = f"{param}: {size} are too long for --max-model-len {self._config.max_model_len}"
        return ApiError(400, f"{message} with at least one output token", param, "context_length_exceeded")


def check_model(asked: str, served: str) -> None:
    """Raises `ApiError` for the name of another model."""
    if asked not in (served, ANY_MODEL):
        message = f"model {asked!r} does not exist: this server has {served!r}, and {ANY_MODEL!r} means it too"
        raise ApiError(404, message, "model", "model_not_found")


def _validated(kind: type[CompletionBody] | type[ChatBody], raw: bytes | bytearray) -> CompletionBody | ChatBody:
    with _without_gc():
        try:
            return kind.model_validate(_parsed(raw))
        except ValidationError as error:
            message, param = describe_validation(error.errors(include_url=False, include_input=False))
            raise ApiError(400, message, param) from None


def _parsed(raw: bytes | bytearray) -> Any:
    """UTF-8 without half surrogate pairs, as pydantic wants its strings.

    Takes half the time of `json` where a body is nothing but keys; keys that a body has once are not worth a cache.
    """
    try:
        return from_json(raw, cache_strings=False)
    except ValueError as error:  # no JSON, or no UTF-8
        raise ApiError(400, f"the request body is not valid JSON: {error}") from None


@contextmanager
def _without_gc() -> Iterator[None]:
    """Millions of new lists would make the cyclic collector walk them again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _options(body: GenerationBody, max_tokens: int) -> Options:
    return Options(
        max_tokens=max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        seed=body.seed,
        stops=body.stop,
        stop_token_ids=tuple(body.stop_token_ids),
        min_tokens=body.min_tokens,
        ignore_eos=body.ignore_eos,
        stream=body.stream,
        include_usage=bool(body.stream_options.include_usage),
        continuous_usage=bool(body.stream_options.continuous_usage_stats),
        return_token_ids=body.return_token_ids,
        session=body.user,
        cache_salt=body.cache_salt,
        reads_cache=not body.skip_reading_prefix_cache,
        writes_cache=not body.skip_writing_prefix_cache,
    )
