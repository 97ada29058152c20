"""The HTTP face: OpenAI-compatible endpoints, health, metrics, and two for operators."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST

from ...errors import InvariantError, KVCacheError
from ..api_error import ApiError, error_body
from ..disaggregation.settings import Role
from ..engine.engine import Engine
from ..engine.engine_core import EngineCore
from ..engine.generation import Delta
from ..intake.intake import Endpoint, Options, check_model
from ..prefill_job import PREFILL_HEADER, PROOF_HEADER, proves
from .access import HostCheck, require_json, require_operator
from .errors import install_error_handlers
from .linger import Linger
from .metrics import Metrics
from .request_bodies import BodyRoom
from .responses import DONE, ChatDialect, CompletionDialect, Dialect, event
from .service import RequestStream, Service

T = TypeVar("T")


def create_app(service: Service, metrics: Metrics) -> FastAPI:
    # Bodies are not parsed by FastAPI, so it could not describe them.
    app = FastAPI(title="fastdeploy-kvcache embedded server", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(HostCheck, host=service.config.host, allowed_hosts=service.config.allowed_hosts)
    app.add_middleware(Linger)
    install_error_handlers(app)
    _add_openai_routes(app, service)
    _add_service_routes(app, service, metrics)
    return app


def _add_openai_routes(app: FastAPI, service: Service) -> None:
    room = BodyRoom(service.config.max_request_mib)

    async def generate(endpoint: Endpoint, dialect: type[Dialect], request: Request) -> Response:
        require_json(request)
        async with room.body(request) as raw:
            stream, reading = await service.start(endpoint, raw, _prefill_url(request, service))
        options = reading.options
        shape = dialect(
            stream.request_id,
            service.config.served_model_name,
            prompt_token_ids=reading.token_ids if options.return_token_ids else None,
            include_usage=options.include_usage,
            continuous_usage=options.continuous_usage,
        )
        return await _answer(options, request, stream, shape)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await generate(Endpoint.COMPLETION, CompletionDialect, request)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await generate(Endpoint.CHAT, ChatDialect, request)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model_body(service)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        check_model(name, service.config.served_model_name)
        return _model_body(service)


def _add_service_routes(app: FastAPI, service: Service, metrics: Metrics) -> None:
    engine = service.engine

    @app.get("/health")
    async def health() -> Response:
        """200 while requests are served, 503 with the reason once they are refused."""
        if engine.fatal_reason is not None:
            return JSONResponse(error_body(503, engine.fatal_reason), 503)
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics_text() -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @app.post("/reset_prefix_cache", dependencies=[Depends(require_operator)])
    async def reset_prefix_cache() -> Response:
        """Embedded server only: forget every cached block. Running requests go on and cache nothing more."""
        await _on_engine(engine, EngineCore.reset_cache)
        return JSONResponse({"status": "ok"})

    @app.get("/debug/check", dependencies=[Depends(require_operator)])
    async def debug_check() -> Response:
        """Embedded server only: prove the cache manager's invariants, and without requests that nothing leaked."""
        try:
            report = await _on_engine(engine, EngineCore.check)
        except InvariantError as error:
            return JSONResponse({"ok": False, "error": str(error)}, 500)
        return JSONResponse({"ok": True, **report})


async def _on_engine(engine: Engine, action: Callable[[EngineCore], T]) -> T:
    """The result of `action` on the engine thread. Raises `InvariantError`, and `ApiError` 503 where it cannot run."""
    try:
        return await asyncio.wrap_future(engine.call(action))
    except InvariantError:
        raise
    except (KVCacheError, RuntimeError) as error:
        raise ApiError(503, str(error)) from None


def _prefill_url(request: Request, service: Service) -> str | None:
    """Which server the router chose to compute the prompt. Raises `ApiError` for a sender that is no router of ours:
    this server would send the prompt wherever the header says.
    """
    url = request.headers.get(PREFILL_HEADER)
    if url is None:
        return None
    role = service.config.role
    if role is None or role.role is not Role.DECODE:
        raise ApiError(400, f"the header {PREFILL_HEADER} is for servers with --role decode")
    if not proves(role.transfer.secret, "url", url.encode(), request.headers.get(PROOF_HEADER, "")):
        raise ApiError(403, f"the header {PREFILL_HEADER} is for a router with the same --peer-secret-file")
    return url


def _model_body(service: Service) -> dict[str, Any]:
    config = service.config
    return {
        "id": config.served_model_name,
        "object": "model",
        "created": service.started_at,
        "owned_by": "fastdeploy-kvcache-v1",
        "max_model_len": config.max_model_len,
    }


async def _answer(options: Options, request: Request, stream: RequestStream, dialect: Dialect) -> Response:
    """The whole answer, or its stream once the first output is there: until then a failure has an HTTP status."""
    watch = asyncio.create_task(_close_on_disconnect(request, stream))
    deltas = stream.deltas()
    try:
        if options.stream:
            first = await anext(deltas)
            chunks = _stream(stream, first, deltas, dialect, watch)
            return StreamingResponse(chunks, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        answer = dialect.plain([delta async for delta in deltas])
    except BaseException:
        stream.close()
        watch.cancel()
        raise
    watch.cancel()
    return JSONResponse(answer)


async def _stream(
    stream: RequestStream, first: Delta, rest: AsyncIterator[Delta], dialect: Dialect, watch: asyncio.Task[None]
) -> AsyncIterator[str]:
    try:
        for body in (*dialect.opening(), *dialect.chunks(first)):
            yield event(body)
        async for delta in rest:
            for body in dialect.chunks(delta):
                yield event(body)
        yield DONE
    except ApiError as error:
        yield event(error.body)
    finally:
        stream.close()
        watch.cancel()


async def _close_on_disconnect(request: Request, stream: RequestStream) -> None:
    """Abort as soon as the client goes away, however long the next token takes."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    stream.close()
