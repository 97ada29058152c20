"""The router's HTTP face: the OpenAI endpoints of the servers behind it, and its own health."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from ..embedded.http.errors import install_error_handlers
from ..embedded.http.request_bodies import BodyRoom
from .forwarding import Forwarder
from .servers import ServerGroup

__all__ = ["RouterSettings", "create_app", "serve"]

GRACE_S = 4
"""After a signal, running requests have this long to end."""


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """Checked by the command."""

    prefill_urls: tuple[str, ...]
    decode_urls: tuple[str, ...]
    secret: bytes = field(repr=False)
    interval_s: float
    timeout_s: float
    max_request_mib: float


def create_app(settings: RouterSettings) -> FastAPI:
    prefills, decodes = ServerGroup(settings.prefill_urls), ServerGroup(settings.decode_urls)
    # The length of an answer is nobody's business here: who stops answering /health is given up, whatever it does.
    http = httpx.AsyncClient(
        timeout=httpx.Timeout(None, connect=settings.timeout_s),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        trust_env=False,
    )
    forwarder = Forwarder(http, prefills, decodes, settings.secret)
    room = BodyRoom(settings.max_request_mib)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        watches = [
            asyncio.create_task(group.watch(http, interval_s=settings.interval_s, timeout_s=settings.timeout_s))
            for group in (prefills, decodes)
        ]
        try:
            yield
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)
            await http.aclose()

    app = FastAPI(title="fastdeploy-kvcache router", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    install_error_handlers(app)

    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    async def generate(request: Request) -> Response:
        async with room.body(request) as body:
            return await forwarder.forward(request, bytes(body))

    @app.get("/v1/models")
    @app.get("/v1/models/{name:path}")
    async def models(request: Request) -> Response:
        return await forwarder.forward(request, b"")

    @app.get("/health")
    async def health() -> Response:
        """200 while a decode server answers."""
        groups = {"prefill": prefills, "decode": decodes}
        servers = {role: {each.url: _state(each) for each in group.servers} for role, group in groups.items()}
        is_served = any(each.is_alive for each in decodes.servers)
        return JSONResponse(
            {"status": "ok" if is_served else "no decode server answers", **servers}, 200 if is_served else 503
        )

    return app


def _state(server: Any) -> dict[str, object]:
    return {"answers": server.is_alive, "open_requests": server.num_open}


class _HttpServer(uvicorn.Server):
    """Prints one ready line to standard output once it listens."""

    def __init__(self, app: FastAPI, settings: RouterSettings) -> None:
        super().__init__(
            uvicorn.Config(
                app, log_config=None, access_log=False, loop="asyncio", ws="none", timeout_graceful_shutdown=GRACE_S
            )
        )
        self._settings = settings

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        assert sockets, "the router is given its socket"
        host, port = sockets[0].getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        counts = f"{len(self._settings.prefill_urls)} prefill and {len(self._settings.decode_urls)} decode servers"
        print(f"Ready: http://{host}:{port} sends requests to {counts}", flush=True)


def serve(settings: RouterSettings, listener: socket.socket) -> None:
    """Until SIGINT or SIGTERM."""
    _HttpServer(create_app(settings), settings).run(sockets=[listener])
