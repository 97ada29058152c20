"""The HTTP endpoints: OpenAI's API, health, metrics, and those for operators."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import msgspec
from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...config import MIB
from ...contract.cache_report import PATH as REPORT_PATH
from ...contract.plan import PATH as PLAN_PATH
from ...errors import InvariantError, KVCacheError
from ...page.state import HEADERS, PAGE_PATH, STATE_PATH, document, state
from ...sizing.planner import Planner
from .api_docs import answers, described_app, readable
from .api_error import ApiError, describe_validation, error_body
from .disaggregation.settings import Role
from .engine.engine import Engine
from .engine.engine_core import EngineCore
from .engine.generation import Delta, Failure
from .metrics import Metrics, parts
from .prefill_job import PREFILL_HEADER, PROOF_HEADER, proves
from .request_fields import SessionBody
from .requests import Reading, RequestReader, check_model
from .responses import DONE, Answer, event
from .settings import ServerConfig

T = TypeVar("T")

logger = logging.getLogger(__name__)

MAX_BODY = 16 * MIB
"""Of a request that says how long it is."""

MOST_TIMES = 128
"""Requests whose times are told: open ones, then the latest that ended."""

ID_HEADER = "X-Request-Id"

CLIENT_CLOSED_REQUEST = 499
"""Status for the log only: no client reads it."""


class Front:
    """ASGI middleware: gives each answer and bug the request's id, and refuses a large body unread."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = headers.get(ID_HEADER) or uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        has_begun = False

        async def tagged_send(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                MutableHeaders(scope=message)[ID_HEADER] = request_id
                logger.info("%s %s %s: %d", request_id, scope["method"], scope["path"], message["status"])
            await send(message)

        size = headers.get("content-length", "")
        try:
            if size.isdecimal() and int(size) > MAX_BODY:
                refusal = error_body(413, f"the request body is larger than {MAX_BODY // MIB} MiB: shorten it")
                await JSONResponse(refusal, 413)(scope, receive, tagged_send)
            else:
                await self._app(scope, receive, tagged_send)
        except Exception as error:
            logger.exception("request %s failed", request_id)
            if not has_begun:
                bug = error_body(500, f"internal error: {type(error).__name__}, see the server's log")
                await JSONResponse(bug, 500)(scope, receive, tagged_send)


class RequestStream:
    """Events of a request on an asyncio loop."""

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
        """Deltas up to the one with a finish reason. Raises `ApiError` for a failure."""
        while not self._ended:
            event = await self._queue.get()
            self._ended = isinstance(event, Failure) or event.finish_reason is not None
            if isinstance(event, Failure):
                raise ApiError.of(event)
            yield event

    def close(self) -> None:
        """Abort the request unless it has ended."""
        if not self._ended:
            self._ended = True
            self._engine.abort(self.request_id)
            self._queue.put_nowait(Failure(CLIENT_CLOSED_REQUEST, "the client closed the connection"))


def create_app(config: ServerConfig, engine: Engine, reader: RequestReader, metrics: Metrics) -> FastAPI:
    app = described_app()
    app.add_middleware(Front)
    add_error_handlers(app)
    _add_openai_routes(app, config, engine, reader)
    _add_service_routes(app, engine, reader, metrics)
    return app


def add_error_handlers(app: FastAPI) -> None:
    """Refusals are one line with the field's name."""

    @app.exception_handler(ApiError)
    async def _api_error(request: Request, error: ApiError) -> JSONResponse:
        return JSONResponse(error.body, error.status)

    @app.exception_handler(RequestValidationError)
    async def _validation_error(request: Request, error: RequestValidationError) -> JSONResponse:
        message, param = describe_validation(error.errors())
        return JSONResponse(error_body(400, message, param), 400)

    @app.exception_handler(HTTPException)
    async def _http_error(request: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse(error_body(error.status_code, str(error.detail)), error.status_code, error.headers)


def _add_openai_routes(app: FastAPI, config: ServerConfig, engine: Engine, reader: RequestReader) -> None:
    name, started_at = config.served_model_name, int(time.time())
    model_body = {"id": name, "object": "model", "created": started_at, "owned_by": "fastdeploy-kvcache-v1"}
    model_body["max_model_len"] = config.max_model_len

    async def generate(request: Request, reading: Reading, *, is_chat: bool) -> Response:
        stream = RequestStream(engine, _engine_id(request.state.request_id, is_chat=is_chat))
        generation = reader.generation(
            reading, stream.request_id, stream.sink, prefill_url=_prefill_url(request, config)
        )
        body = reading.body
        answer = Answer(
            stream.request_id,
            name,
            is_chat=is_chat,
            prompt_token_ids=reading.token_ids if body.return_token_ids else None,
            include_usage=bool(body.stream_options.include_usage),
            continuous_usage=bool(body.stream_options.continuous_usage_stats),
        )
        engine.submit(generation)
        return await _respond(request, stream, answer, streams=body.stream)

    read_completion, read_chat = Depends(reader.completion), Depends(reader.chat)  # no coroutines: run in threads

    @app.post("/v1/completions", responses=answers(is_chat=False))
    async def completions(request: Request, reading: Reading = read_completion) -> Response:
        """Continue a prompt."""
        return await generate(request, reading, is_chat=False)

    @app.post("/v1/chat/completions", responses=answers(is_chat=True))
    async def chat_completions(request: Request, reading: Reading = read_chat) -> Response:
        """Answer a conversation."""
        return await generate(request, reading, is_chat=True)

    @readable(app, "/v1/models")
    async def models() -> dict[str, Any]:
        """The model that is served."""
        return {"object": "list", "data": [model_body]}

    @readable(app, "/v1/models/{asked:path}")
    async def model(asked: str) -> dict[str, Any]:
        """The model that is served, if it has this name or is asked for as `default`."""
        check_model(asked, name)
        return model_body


def _add_service_routes(app: FastAPI, engine: Engine, reader: RequestReader, metrics: Metrics) -> None:
    @app.post("/v1/cache/session")
    async def tell_return(body: SessionBody) -> dict[str, bool]:
        """Tell when a session sends its next request. `known` is false for a session that the cache does not know."""
        reader.fields.check(body.unknown)
        return {"known": await _on_engine(engine, lambda core: core.manager.tell_return(body.session))}

    @readable(app, REPORT_PATH)
    def cache_report() -> Response:
        """Tell what the latest requests missed, and why; `fastdeploy-kvcache explain` reads it."""
        report = engine.core.manager.report(parts(engine.core))
        return Response(msgspec.json.encode(report), media_type="application/json")

    planner = Planner(engine.core.manager)

    @readable(app, PLAN_PATH)
    def cache_plan() -> Response:
        """Tell what other sizes of the tiers would have hit. It takes seconds: ask again while it is not ready."""
        return Response(msgspec.json.encode(planner.plan()), media_type="application/json")

    @readable(app, "/health")
    async def health() -> Response:
        """200 while requests are served, 503 with the reason once they are refused or while the worker stands still."""
        if (reason := engine.fatal_reason or engine.standstill) is not None:
            return JSONResponse(error_body(503, reason), 503)
        return JSONResponse({"status": "ok"})

    @readable(app, "/metrics")
    async def metrics_text() -> Response:
        """Metrics in Prometheus' text format."""
        return Response(metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache(reset_external: bool = False) -> Response:
        """Forget the cached blocks of device and host tier; with `reset_external` (vLLM's name) also the store's."""
        tiers = await _on_engine(engine, lambda core: core.reset_cache(stored=reset_external))
        return JSONResponse({"status": "ok", **tiers})

    @readable(app, "/debug/check")
    async def debug_check() -> Response:
        """Check the cache manager's invariants, and on an idle server also that no block leaked."""
        try:
            report = await _on_engine(engine, EngineCore.check)
        except InvariantError as error:
            return JSONResponse({"ok": False, "error": str(error)}, 500)
        return JSONResponse({"ok": True, **report})

    @readable(app, PAGE_PATH, include_in_schema=False)
    async def cache_page() -> Response:
        return HTMLResponse(document(), headers=HEADERS)

    @readable(app, STATE_PATH)
    async def cache_state() -> Response:
        """Tell what /debug/cache shows: requests, causes of misses, blocks and metrics, without texts and tokens."""
        core, manager = engine.core, engine.core.manager
        times = await _on_engine(engine, lambda core: core.requests(MOST_TIMES))
        snapshot = manager.snapshot(stored=() if core.storage is None else core.storage.known)
        shown = state(manager.report(parts(core)), snapshot, times)
        return Response(msgspec.json.encode(shown), media_type="application/json")


async def _on_engine(engine: Engine, action: Callable[[EngineCore], T]) -> T:
    """The result of `action` on the engine thread. Raises `InvariantError`, or `ApiError` 503 if it cannot run."""
    try:
        return await asyncio.wrap_future(engine.call(action))
    except InvariantError:
        raise
    except (KVCacheError, RuntimeError) as error:
        raise ApiError(503, str(error)) from None


def _engine_id(request_id: str, *, is_chat: bool) -> str:
    """Begins with the client's id, and is new even if the client repeats it."""
    told = re.sub(r"[^\w.:-]", "_", request_id, flags=re.ASCII)[:64]
    return f"{'chatcmpl' if is_chat else 'cmpl'}-{told}-{secrets.token_hex(4)}"


def _prefill_url(request: Request, config: ServerConfig) -> str | None:
    """The prefill server that the router chose. Raises `ApiError` for a sender without the secret, which could have the
    prompt sent to any address.
    """
    url = request.headers.get(PREFILL_HEADER)
    if url is None:
        return None
    role = config.role
    if role is None or role.role is not Role.DECODE:
        raise ApiError(400, f"the header {PREFILL_HEADER} is for servers with --role decode")
    if not proves(role.transfer.secret, "url", url.encode(), request.headers.get(PROOF_HEADER, "")):
        raise ApiError(403, f"the header {PREFILL_HEADER} is for a router with the same --peer-secret-file")
    return url


async def _respond(request: Request, stream: RequestStream, answer: Answer, *, streams: bool) -> Response:
    """The whole answer, or a stream from the first output on. A failure before it has an HTTP status."""
    watch = asyncio.create_task(_close_on_disconnect(request, stream))
    deltas = stream.deltas()
    try:
        if streams:
            first = await anext(deltas)
            events = _events(stream, first, deltas, answer, watch)
            return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        body = answer.whole([delta async for delta in deltas])
    except BaseException:
        stream.close()
        watch.cancel()
        raise
    watch.cancel()
    return JSONResponse(body)


async def _events(
    stream: RequestStream, first: Delta, rest: AsyncIterator[Delta], answer: Answer, watch: asyncio.Task[None]
) -> AsyncIterator[str]:
    try:
        for body in (*answer.opening(), *answer.chunks(first)):
            yield event(body)
        async for delta in rest:
            for body in answer.chunks(delta):
                yield event(body)
        yield DONE
    except ApiError as error:
        yield event(error.body)
    finally:
        stream.close()
        watch.cancel()


async def _close_on_disconnect(request: Request, stream: RequestStream) -> None:
    """Abort at once when the client goes away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    stream.close()
