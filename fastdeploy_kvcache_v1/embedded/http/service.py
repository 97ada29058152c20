"""Between the API and the engine: starts what was read from a request, and carries its events to asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import time
import uuid
from collections.abc import AsyncIterator

from ...metadata import CacheAccess
from ...model.sampler import SamplingParams
from ...scheduler.cache_utils import BlockHasher, MultimodalItem
from ..api_error import ApiError
from ..engine.engine import Engine
from ..engine.generation import Delta, Failure, Generation, GenerationRequest
from ..intake.client import BodyReader
from ..intake.images import ImagesLeftError
from ..intake.intake import Endpoint, Intake, IntakeConfig, Options, Reading
from ..settings import ServerConfig
from ..text import Tokenizer

CLIENT_CLOSED_REQUEST = 499
"""Status for the log only: no client reads it."""

SMALL_BODY = 8 * 1024
"""Bytes up to which a body is read on the event loop: that takes a few milliseconds whatever is in it."""


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
        with contextlib.suppress(RuntimeError):  # the loop is closed: no client reads any more
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

    def __init__(self, config: ServerConfig, tokenizer: Tokenizer, engine: Engine, body_reader: BodyReader) -> None:
        self.config = config
        self.engine = engine
        self.started_at = int(time.time())
        self._tokenizer = tokenizer
        self._random = random.Random(config.seed)
        self._intake = Intake(intake_config(config), tokenizer, decodes_images=False)
        self._body_reader = body_reader

    async def start(
        self, endpoint: Endpoint, raw: bytes | bytearray, prefill_url: str | None = None
    ) -> tuple[RequestStream, Reading]:
        """The request in a body is with the engine; the server at `prefill_url` is to compute its prompt. Raises
        `ApiError` when it is not one.
        """
        reading = await self._read(endpoint, raw)
        prefix = "chatcmpl" if endpoint is Endpoint.CHAT else "cmpl"
        return self._start(reading, f"{prefix}-{uuid.uuid4().hex}", prefill_url), reading

    async def _read(self, endpoint: Endpoint, raw: bytes | bytearray) -> Reading:
        runs_template = endpoint is Endpoint.CHAT and self._tokenizer.has_template
        if len(raw) <= SMALL_BODY and not runs_template:
            with contextlib.suppress(ImagesLeftError):  # a small file may hold a large image
                return self._intake.read(endpoint, raw)
        return await self._body_reader.read(endpoint, raw)

    def _start(self, reading: Reading, request_id: str, prefill_url: str | None) -> RequestStream:
        options = reading.options
        end_ids = frozenset() if options.ignore_eos else self._tokenizer.eos_token_ids
        banned = tuple(sorted(token for token in end_ids if 0 <= token < self.config.vocab_size))
        sampling = self._sampling(options)
        request = GenerationRequest(
            request_id=request_id,
            prompt_ids=reading.token_ids,
            max_tokens=options.max_tokens,
            sampling=sampling,
            stop_token_ids=end_ids | set(options.stop_token_ids),
            min_tokens=options.min_tokens,
            early_sampling=dataclasses.replace(sampling, banned_tokens=banned),
            images=reading.images,
            session=options.session,
            cache_salt=options.cache_salt or "",
        )
        hasher = BlockHasher(
            self.config.cache.block_size,
            items=[
                MultimodalItem(placed.offset, placed.image.num_tokens, placed.image.content_hash)
                for placed in reading.images
            ],
            salt=(options.cache_salt or "").encode(),
            access=CacheAccess(options.reads_cache, options.writes_cache),
        )
        hasher.extend(list(reading.token_ids))
        stream = RequestStream(self.engine, request_id)
        text = self._tokenizer.stream(options.stops)
        self.engine.submit(Generation(request, hasher, text, stream.sink, prefill_url=prefill_url))
        return stream

    def _sampling(self, options: Options) -> SamplingParams:
        """Unset values are OpenAI's defaults; a request without a seed draws one, so that a retry repeats itself."""
        return SamplingParams(
            temperature=1.0 if options.temperature is None else options.temperature,
            top_p=1.0 if options.top_p is None else options.top_p,
            top_k=options.top_k,
            min_p=options.min_p,
            seed=self._random.getrandbits(63) if options.seed is None else options.seed,
        )


def intake_config(config: ServerConfig) -> IntakeConfig:
    return IntakeConfig(
        model_path=config.model_path,
        served_model_name=config.served_model_name,
        vocab_size=config.vocab_size,
        max_model_len=config.max_model_len,
        num_device_blocks=config.cache.num_device_blocks,
        block_size=config.cache.block_size,
        max_request_mib=config.max_request_mib,
        checks_model_name=config.checks_model_name,
    )
