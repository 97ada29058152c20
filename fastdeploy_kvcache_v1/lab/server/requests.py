"""From the body of a request to tokens, and to the engine's request."""

from __future__ import annotations

import dataclasses
import logging
import threading
from dataclasses import dataclass
from typing import Annotated

from fastapi import Header

from ...contract.sessions import checked_session_id
from ...scheduler.block_hashing import BlockHasher, MultimodalItem
from ..model.vision import Image, PlacedImage
from .api_error import ApiError
from .engine.generation import Generation, Sink
from .field_names import FieldCheck
from .images import read_image
from .request_fields import ChatBody, CompletionBody, GenerationBody, ImageUrl, Message
from .settings import ServerConfig
from .text import Tokenizer

logger = logging.getLogger(__name__)

COMPLETION_MAX_TOKENS = 16
"""Default of /v1/completions, as in OpenAI's API. A chat may run up to the limit of model and cache."""

SessionHeader = Annotated[str | None, Header(description="The session, where the body has no `session_id`.")]

ANY_MODEL = "default"
"""A name for the served model, as in FastDeploy."""


@dataclass(frozen=True)
class Reading:
    """A request that fits model and cache."""

    body: GenerationBody
    token_ids: tuple[int, ...]
    max_tokens: int
    hasher: BlockHasher
    """Block hashes of `token_ids`."""
    images: tuple[PlacedImage, ...] = ()
    """In the order of their placeholders in `token_ids`."""


class RequestReader:
    """Reads request bodies. Thread-safe. Raises `ApiError`, one line."""

    def __init__(self, config: ServerConfig, tokenizer: Tokenizer) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self.fields = FieldCheck(strict=config.strict_fields)
        self._first_without_limit = threading.Lock()
        """Taken for good by the first chat without max_tokens, which the log names."""

    def completion(self, body: CompletionBody, x_session_id: SessionHeader = None) -> Reading:
        self._check(body, x_session_id)
        token_ids: str | list[int] | None = body.prompt_token_ids or body.prompt
        if isinstance(token_ids, str):
            token_ids = self._tokenizer.encode(token_ids)
        assert token_ids is not None, "the body requires a prompt"
        return self._reading(body, token_ids, "prompt", COMPLETION_MAX_TOKENS)

    def chat(self, body: ChatBody, x_session_id: SessionHeader = None) -> Reading:
        self._check(body, x_session_id)
        if body.prompt_token_ids:
            return self._reading(body, body.prompt_token_ids, "messages", self._config.max_model_len)
        images: list[Image] = []
        try:
            messages = [self._message(message, images) for message in body.messages]
            token_ids = self._tokenizer.apply_chat_template(messages, body.template_variables)
            placed = self._placed(token_ids, images)
        except ValueError as error:  # templates refuse role orders they do not know
            raise ApiError(400, f"messages: {error}", "messages") from None
        return self._reading(body, token_ids, "messages", self._config.max_model_len, placed)

    def generation(
        self, reading: Reading, request_id: str, sink: Sink, *, prefill_url: str | None = None
    ) -> Generation:
        """The engine's request. `prefill_url`: the server that computes the prompt."""
        body = reading.body
        ends = frozenset() if body.ignore_eos else self._tokenizer.eos_token_ids
        sampling = body.sampling()
        banned = tuple(sorted(token for token in ends if 0 <= token < self._config.model.vocab_size))
        request = body.request(
            request_id=request_id,
            prompt_ids=reading.token_ids,
            max_tokens=reading.max_tokens,
            sampling=sampling,
            stop_token_ids=ends | set(body.stop_token_ids),
            early_sampling=dataclasses.replace(sampling, banned_tokens=banned),
            images=reading.images,
        )
        return Generation(request, reading.hasher, self._tokenizer.stream(body.stop), sink, prefill_url=prefill_url)

    def _check(self, body: GenerationBody, header: str | None) -> None:
        """Check the names of fields, and give the body a `session_id` from elsewhere."""
        self.fields.check(body.unknown)
        if body.session_id is None and header is not None:
            try:
                body.session_id = checked_session_id(header.encode("latin-1").decode(errors="replace"))
            except ValueError as error:
                raise ApiError(400, f"X-Session-ID: {error}", "X-Session-ID") from None
        body.session_id = body.session_id or body.prompt_cache_key or body.user

    def _message(self, message: Message, images: list[Image]) -> dict[str, object]:
        """The message for the template; adds its images to `images`. Raises `ValueError` for a bad image."""
        if isinstance(message.content, str):
            return {"role": message.role, "content": message.content}
        parts: list[dict[str, object]] = []
        for part in message.content:
            if not isinstance(part, ImageUrl):
                parts.append({"type": "text", "text": part})
            elif self._tokenizer.image_token is None:
                raise ValueError("this model sees no images: send text only")
            else:
                images.append(read_image(part.url))
                parts.append({"type": "image", "num_tokens": images[-1].num_tokens})
        return {"role": message.role, "content": parts}

    def _placed(self, token_ids: list[int], images: list[Image]) -> tuple[PlacedImage, ...]:
        """Assign the placeholders to the images in order. Raises `ValueError` for a placeholder in a text."""
        if not images:
            return ()
        places = [index for index, token in enumerate(token_ids) if token == self._tokenizer.image_token_id]
        if len(places) != sum(image.num_tokens for image in images):
            raise ValueError(f"a text beside images must not hold {self._tokenizer.image_token}")
        placed, first = [], 0
        for image in images:
            placed.append(PlacedImage(places[first], image))
            first += image.num_tokens
        return tuple(placed)

    def _reading(
        self,
        body: GenerationBody,
        token_ids: list[int],
        param: str,
        default_max_tokens: int,
        images: tuple[PlacedImage, ...] = (),
    ) -> Reading:
        config = self._config
        if config.checks_model_name and body.model:
            check_model(body.model, config.served_model_name)
        if not token_ids:
            raise ApiError(400, f"{param}: must not be empty", param)
        if min(token_ids) < 0 or max(token_ids) >= config.model.vocab_size:
            param = "prompt_token_ids" if body.prompt_token_ids else param
            raise ApiError(400, f"{param}: token ids must lie in 0..{config.model.vocab_size - 1}", param)
        max_tokens = self._max_tokens(len(token_ids), body.token_limit, param, default_max_tokens)
        hasher = BlockHasher(
            config.cache.block_size,
            items=[MultimodalItem(at, image.num_tokens, image.content_hash) for at, image in images],
            salt=body.cache_salt.encode(),
            access=body.access,
            session=body.session,
        )
        hasher.extend(token_ids)
        return Reading(body, tuple(token_ids), max_tokens, hasher, images)

    def _max_tokens(self, num_prompt: int, asked: int | None, param: str, default: int) -> int:
        """Output limit, cut to the positions that the model has, as FastDeploy does.

        Raises `ApiError` for a request that could never run, before it is queued.
        """
        config = self._config
        num_blocks, block_size = config.cache.num_device_blocks, config.cache.block_size
        model_room = config.max_model_len - num_prompt
        if model_room < 1:
            fault = f"{num_prompt} tokens are too long for --max-model-len {config.max_model_len}"
            raise ApiError(400, f"{param}: {fault} with at least one output token", param, "context_length_exceeded")
        # The last sampled token's KV is never written, so the blocks have room for one token more.
        cache_room = num_blocks * block_size - num_prompt + 1
        wanted = min(default, max(cache_room, 1)) if asked is None else asked
        if min(wanted, model_room) > cache_room:
            message = (
                f"{num_prompt} prompt tokens and {min(wanted, model_room)} output tokens do not fit the device tier's "
                f"{num_blocks} blocks of {block_size} tokens: lower max_tokens"
            )
            raise ApiError(400, message, "max_tokens", "context_length_exceeded")
        num_tokens = min(wanted, model_room)
        if asked is None and default >= config.max_model_len and self._first_without_limit.acquire(blocking=False):
            limit = f"--max-model-len {config.max_model_len}"
            if cache_room < model_room:
                limit = f"the device tier's {num_blocks} blocks of {block_size} tokens"
            logger.warning(
                "a chat without max_tokens may run for %d output tokens, which fill %s: send max_tokens, or lower "
                "--max-model-len (logged once)",
                *(num_tokens, limit),
            )
        return num_tokens


def check_model(asked: str, served: str) -> None:
    """Raises `ApiError` for the name of another model."""
    if asked not in (served, ANY_MODEL):
        message = f"model {asked!r} does not exist: this server has {served!r}, and {ANY_MODEL!r} means it too"
        raise ApiError(404, message, "model", "model_not_found")
