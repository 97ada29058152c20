"""Between the API and the engine: checks a request against model and cache, and carries its events to asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple, TypeVar

from ..cache_utils import BlockHasher
from .api_error import ApiError
from .engine import Engine
from .generation import Delta, Failure, Generation, GenerationRequest
from .protocol import ChatBody, CompletionBody, GenerationBody
from .sampler import SamplingParams
from .settings import ServerConfig
from .text import TextStream
from .tokenizer import Tokenizer

B = TypeVar("B", bound=GenerationBody)

COMPLETION_MAX_TOKENS = 16
"""Default of /v1/completions, as OpenAI has it; chats run up to the limit of model and cache."""

CLIENT_CLOSED_REQUEST = 499
"""Status for the log only: nobody is there to read it."""


BIG_PROMPT = 4096
"""From so many characters or token ids on, a prompt is read on a thread: other clients must not wait for it."""


class _Prompt(NamedTuple):
    token_ids: tuple[int, ...]
    hasher: BlockHasher
    """Has seen `token_ids`."""
    max_tokens: int


async def _aside(size: int, read: Callable[[B], _Prompt], body: B) -> _Prompt:
    return read(body) if size < BIG_PROMPT else await asyncio.to_thread(read, body)


class RequestStream:
    """Events of one request on an asyncio loop."""

    def __init__(self, engine: Engine, request_id: str) -> None:
        self.request_id = request_id
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Delta | Failure] = asyncio.Queue()
        self._ended = False

    def sink(self, event: Delta | Failure) -> None:
        """Called on the engine thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads any more
            self._loop.call_soon_threadsafe(self._queue.put_nowait, event)

    async def deltas(self) -> AsyncIterator[Delta]:
        """Every delta up to the one with a finish reason. Raises `ApiError` for a failure."""
        while not self._ended:
            event = await self._queue.get()
            self._ended = isinstance(event, Failure) or event.finish_reason is not None
            if isinstance(event, Failure):
                raise ApiError.of(event)
            yield event

    def close(self) -> None:
        """The client is gone or served: an unfinished request is aborted."""
        if not self._ended:
            self._ended = True
            self._engine.abort(self.request_id)
            self._queue.put_nowait(Failure(CLIENT_CLOSED_REQUEST, "the client closed the connection"))


class Service:
    """Turns request bodies into generations. Used on the event loop only."""

    def __init__(self, config: ServerConfig, tokenizer: Tokenizer, engine: Engine) -> None:
        self.config = config
        self.engine = engine
        self.started_at = int(time.time())
        self._tokenizer = tokenizer
        self._random = random.Random(config.seed)

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.config.served_model_name:
            message = f"model {name!r} does not exist, this server has {self.config.served_model_name!r}"
            raise ApiError(404, message, "model", "model_not_found")

    async def start_completion(self, body: CompletionBody) -> RequestStream:
        self.check_model(body.model)
        prompt = await _aside(len(body.prompt), self._read_prompt, body)
        return self._start(body, prompt, "cmpl")

    async def start_chat(self, body: ChatBody) -> RequestStream:
        self.check_model(body.model)
        prompt = await _aside(sum(len(message.content) for message in body.messages), self._read_messages, body)
        return self._start(body, prompt, "chatcmpl")

    def _read_prompt(self, body: CompletionBody) -> _Prompt:
        """Any thread."""
        if isinstance(body.prompt, str):
            token_ids = self._tokenizer.encode(body.prompt)
        else:
            token_ids = body.prompt
            vocab_size = self.config.vocab_size
            if min(token_ids) < 0 or max(token_ids) >= vocab_size:
                raise ApiError(400, f"prompt: token ids must lie in 0..{vocab_size - 1}", "prompt")
        return self._hashed(body, token_ids, "prompt", COMPLETION_MAX_TOKENS)

    def _read_messages(self, body: ChatBody) -> _Prompt:
        """Any thread."""
        try:
            token_ids = self._tokenizer.apply_chat_template([message.as_dict() for message in body.messages])
        except ValueError as error:  # templates refuse role orders they do not know
            raise ApiError(400, f"messages: {error}", "messages") from None
        return self._hashed(body, token_ids, "messages", None)

    def _hashed(
        self, body: GenerationBody, token_ids: list[int], param: str, default_max_tokens: int | None
    ) -> _Prompt:
        max_tokens = self._max_tokens(len(token_ids), body.token_limit, param, default_max_tokens)
        hasher = BlockHasher(self.config.cache.block_size)
        hasher.extend(token_ids)
        return _Prompt(tuple(token_ids), hasher, max_tokens)

    def _start(self, body: GenerationBody, prompt: _Prompt, prefix: str) -> RequestStream:
        stop_ids = set(body.stop_token_ids)
        if not body.ignore_eos:
            stop_ids.update(self._tokenizer.eos_token_ids)
        request = GenerationRequest(
            request_id=f"{prefix}-{uuid.uuid4().hex}",
            prompt_ids=prompt.token_ids,
            max_tokens=prompt.max_tokens,
            sampling=self._sampling(body),
            stop_token_ids=frozenset(stop_ids),
            min_tokens=body.min_tokens,
        )
        stream = RequestStream(self.engine, request.request_id)
        text = TextStream(self._tokenizer.detokenizer(), body.stops)
        self.engine.submit(Generation(request, prompt.hasher, text, stream.sink))
        return stream

    def _sampling(self, body: GenerationBody) -> SamplingParams:
        """Unset values are OpenAI's defaults; a request without a seed draws one, so that a retry repeats itself."""
        return SamplingParams(
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            seed=self._random.getrandbits(63) if body.seed is None else body.seed,
        )

    def _max_tokens(self, num_prompt: int, asked: int | None, param: str, default: int | None) -> int:
        """Output limit. Raises `ApiError` for a request that could never run, before anything is queued."""
        if not num_prompt:
            raise ApiError(400, f"{param}: must not be empty", param)
        model_room = self.config.max_model_len - num_prompt
        if model_room < 1:
            message = f"{param}: {num_prompt} tokens are too long for --max-model-len {self.config.max_model_len}"
            raise ApiError(400, f"{message} with at least one output token", param, "context_length_exceeded")
        cache = self.config.cache
        # The last sampled token's KV is never written, so the blocks carry one token more.
        cache_room = cache.num_device_blocks * cache.block_size - num_prompt + 1
        room = min(model_room, cache_room)
        if room < 1 or (asked is not None and asked > room):
            limit = (
                f"--max-model-len {self.config.max_model_len}"
                if model_room <= cache_room
                else f"the device tier's {cache.num_device_blocks} blocks of {cache.block_size} tokens"
            )
            message = f"{num_prompt} prompt tokens and {asked or 1} output tokens do not fit {limit}"
            raise ApiError(400, message, "max_tokens", "context_length_exceeded")
        return asked or min(room, default or room)
