"""The router as an ASGI app.

A request goes to the decode server with the fewest open requests, and names the prefill server with the fewest. Until
the first byte of an answer it may go to another decode server; then bytes are relayed. A session's time of return goes
to every server. Runs on one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import uuid
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from urllib.parse import quote

import anyio
import httpx2
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ..server.api_error import error_body
from ..server.http_server import TwoSignalServer
from ..server.prefill_job import PREFILL_HEADER, PROOF_HEADER, proof

__all__ = ["Forwarder", "HttpServer", "Server", "choose", "create_app"]

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
"""Seconds between two checks of a server's /health."""

SOON_S = 10.0
"""Limit for a connection and for /health; a slower server gets no requests."""

MAX_BODY_BYTES = 16 << 20
"""Of a request, which is kept until its answer begins."""

CUT_S = 2.0
"""After requests were refused, connections of clients that do not read are cut."""

SICK = (502, 503, 504)
"""Statuses after which another server is tried."""

MODELS = "/v1/models"
SESSION = "/v1/cache/session"
TO_SERVERS = b"accept authorization content-type traceparent tracestate x-request-id x-session-id".split()
TO_CLIENTS = (
    b"allow cache-control content-encoding content-length content-type location retry-after www-authenticate "
    b"x-request-id"
).split()
"""Headers that are relayed. Others are not, such as a client's own choice of a prefill server."""


class Server:
    def __init__(self, url: str) -> None:
        self.url = url
        self.answers = True
        """Result of the last check or connection; True before the first."""
        self.num_open = 0
        """Open requests of this router."""
        self._has_answered = False

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1

    def found(self, answers: bool, reason: str) -> None:
        """Note the result of a check or connection, and log a change. A starting server is no fault."""
        if answers != self.answers:
            level = logging.WARNING if self._has_answered and not answers else logging.INFO
            logger.log(level, "%s %s", self.url, "answers" if answers else f"does not answer, left out: {reason}")
        self.answers = answers
        self._has_answered = self._has_answered or answers


def choose(servers: list[Server], without: Collection[Server] = ()) -> Server | None:
    """The server with the fewest open requests among those that answer, by turns among equals, or None."""
    candidates = [each for each in servers if each.answers and each not in without]
    if not candidates:
        return None
    chosen = min(candidates, key=lambda each: each.num_open)
    servers.remove(chosen)
    servers.append(chosen)
    return chosen


class Forwarder:
    """ASGI app: a client's request on its way to a decode server and back."""

    def __init__(self, prefills: Sequence[str], decodes: Sequence[str], secret: bytes, *, silence_s: float) -> None:
        """URLs of servers. A decode server without a byte for `silence_s` has lost the request."""
        self.prefills, self.decodes = [Server(url) for url in prefills], [Server(url) for url in decodes]
        self.refuses = asyncio.Event()
        """Once set, every open request ends with an error."""
        self._secret = secret
        self._silence_s = silence_s
        self._http = httpx2.AsyncClient(
            headers={"accept-encoding": "identity"},
            timeout=httpx2.Timeout(silence_s, connect=SOON_S, pool=None),
            # A server may close an idle connection when it is reused, which would look like its death.
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,
        )

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Check each server periodically inside the block."""
        async with self._http, anyio.create_task_group() as group:
            for server in (*self.prefills, *self.decodes):
                group.start_soon(self._watch, server)
            yield
            group.cancel_scope.cancel()

    async def _watch(self, server: Server) -> None:
        while True:
            try:
                async with self._http.stream("GET", f"{server.url}/health", timeout=SOON_S) as answer:
                    status = answer.status_code
                server.found(status == 200, f"/health answers with HTTP {status}")
            except httpx2.HTTPError as error:
                server.found(False, _text(error))
            await anyio.sleep(LOOK_EVERY_S)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run until the answer is complete, or the client is gone. Then the connection to the decode server closes."""
        if (body := await _body(receive)) is None:
            return
        exchange = Exchange(scope, body, send)
        error: Response | None = None
        is_over = False
        async with anyio.create_task_group() as group:
            group.start_soon(_until_gone, receive, group.cancel_scope)
            group.start_soon(self._until_refused, group.cancel_scope)
            error = await (self._tell_all if exchange.path == SESSION else self._forward)(exchange)
            is_over = True
            group.cancel_scope.cancel()
        if not is_over and self.refuses.is_set():
            error = await exchange.refuse("the router is shutting down")
        if error is not None:
            await error(scope, receive, send)

    async def _until_refused(self, scope: anyio.CancelScope) -> None:
        await self.refuses.wait()
        scope.cancel()

    async def _forward(self, exchange: Exchange) -> Response | None:
        """Try each decode server once and relay its answer. Returns an error for the client."""
        tried, reasons = set[Server](), list[str]()
        while (decode := choose(self.decodes, tried)) is not None:
            tried.add(decode)
            is_last = not any(each.answers for each in self.decodes if each not in tried)
            with decode.busy(), contextlib.ExitStack() as computing_prompt:
                reason = await self._ask(exchange, decode, computing_prompt, is_last=is_last)
            if reason is None:
                return None
            reasons.append(f"{decode.url}: {reason}")
            logger.warning("request %s: %s", exchange.name, reasons[-1])
            if exchange.begun:
                await exchange.break_off(f"{reasons[-1]}; the answer is not complete")
                return None
        reasons = reasons or [f"{each.url} does not answer" for each in self.decodes]
        return JSONResponse(error_body(503, f"no decode server answers the request: {'; '.join(reasons)}"), 503)

    async def _tell_all(self, exchange: Exchange) -> Response:
        """Send the request to each server that answers, because any may have the session's blocks. Returns one answer:
        of a server that knows the session, if there is one.
        """
        servers = [each for each in (*self.prefills, *self.decodes) if each.answers]
        answers = [each for each in await asyncio.gather(*(self._tell(each, exchange) for each in servers)) if each]
        answer = max(answers, key=lambda each: (each.status_code == 200, b"true" in each.content), default=None)
        if answer is None:
            return JSONResponse(error_body(503, "no server answers the request"), 503)
        return Response(answer.content, answer.status_code, media_type="application/json")

    async def _tell(self, server: Server, exchange: Exchange) -> httpx2.Response | None:
        """The answer of `server`, or None if it fails."""
        url, body = server.url + exchange.path, exchange.body
        try:
            return await self._http.post(url, content=body, headers=exchange.headers, timeout=SOON_S)
        except httpx2.HTTPError as error:
            logger.warning("request %s: %s: %s", exchange.name, server.url, _text(error))
            return None

    async def _ask(
        self, exchange: Exchange, decode: Server, computing_prompt: contextlib.ExitStack, *, is_last: bool
    ) -> str | None:
        """Relay the answer of `decode`; its first byte ends `computing_prompt`. Returns an error."""
        headers = exchange.headers
        prefill = choose(self.prefills) if exchange.method == "POST" else None
        if prefill is not None:
            computing_prompt.enter_context(prefill.busy())
            evidence = proof(self._secret, "url", prefill.url.encode())
            headers = {
                **headers,
                PREFILL_HEADER.encode(): prefill.url.encode(),
                PROOF_HEADER.encode(): evidence.encode(),
            }
        url = decode.url + exchange.path
        try:
            async with self._http.stream(exchange.method, url, content=exchange.body, headers=headers) as answer:
                if answer.status_code in SICK and not is_last:
                    return f"it answered with HTTP {answer.status_code}"
                chunks = answer.aiter_raw()
                first = await anext(chunks, b"")
                computing_prompt.close()
                await exchange.begin(answer, first)
                async for chunk in chunks:
                    await exchange.relay(chunk)
                await exchange.relay(b"", more=False)
                return None
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            decode.found(False, _text(error))
            return f"it cannot be reached: {_text(error)}"
        except httpx2.TimeoutException:
            return f"it was silent for {self._silence_s:g} s"
        except httpx2.HTTPError as error:
            return f"it broke off: {_text(error)}"


class Exchange:
    """A client's request and its answer."""

    def __init__(self, scope: Scope, body: bytes, send: Send) -> None:
        name = scope["path_params"].get("name")  # one path segment for any name of a model
        self.method, self.path = (
            str(scope["method"]),
            f"{MODELS}/{quote(name, safe='')}" if name else str(scope["path"]),
        )
        self.body = body
        self.headers = {name: value for name, value in scope["headers"] if name in TO_SERVERS}
        self.headers.setdefault(b"x-request-id", uuid.uuid4().hex.encode())
        self.name = self.headers[b"x-request-id"].decode("latin-1")
        self.begun = False
        """The status was sent."""
        self._is_stream = False
        self._send = send

    async def begin(self, answer: httpx2.Response, first: bytes) -> None:
        headers = {name.lower(): value for name, value in answer.headers.raw if name.lower() in TO_CLIENTS}
        headers.setdefault(b"x-request-id", self.headers[b"x-request-id"])
        self.begun, self._is_stream = True, headers.get(b"content-type", b"").startswith(b"text/event-stream")
        await self._send(
            {"type": "http.response.start", "status": answer.status_code, "headers": list(headers.items())}
        )
        await self.relay(first)

    async def relay(self, chunk: bytes, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": chunk, "more_body": more})

    async def refuse(self, reason: str) -> Response | None:
        """End at once. Returns the answer where none has begun."""
        if not self.begun:
            return JSONResponse(error_body(503, reason), 503)
        await self.break_off(reason)
        return None

    async def break_off(self, reason: str) -> None:
        """End a stream with an error event. Any other answer stays short, which closes the connection."""
        if self._is_stream:
            await self.relay(f"\n\ndata: {json.dumps(error_body(502, reason))}\n\n".encode(), more=False)


async def _body(receive: Receive) -> bytes | None:
    """None if the client leaves. Raises `HTTPException` for a body that is too large."""
    body = bytearray()
    while (message := await receive())["type"] == "http.request":
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413, f"the request body is larger than {MAX_BODY_BYTES >> 20} MiB: shorten it")
        if not message.get("more_body", False):
            return bytes(body)
    return None


async def _until_gone(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__


def create_app(forwarder: Forwarder, *, ready: str = "") -> Starlette:
    """The app prints `ready` once it runs."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with forwarder.watching():
            print(ready, flush=True)
            yield

    async def health(request: Request) -> Response:
        """200 while a decode server answers."""
        groups = {"prefill": forwarder.prefills, "decode": forwarder.decodes}
        servers = {
            role: {each.url: {"answers": each.answers, "open_requests": each.num_open} for each in group}
            for role, group in groups.items()
        }
        is_served = any(each.answers for each in forwarder.decodes)
        status = "ok" if is_served else "no decode server answers"
        return JSONResponse({"status": status, **servers}, 200 if is_served else 503)

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return JSONResponse(error_body(error.status_code, error.detail), error.status_code, error.headers)

    routes = [
        *(Route(path, forwarder, methods=["POST"]) for path in ("/v1/completions", "/v1/chat/completions", SESSION)),
        *(Route(path, forwarder, methods=["GET"]) for path in (MODELS, f"{MODELS}/{{name:path}}")),
        Route("/health", health),
    ]
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: refused})


class HttpServer(TwoSignalServer):
    def __init__(self, forwarder: Forwarder, ready: str = "") -> None:
        super().__init__(create_app(forwarder, ready=ready), loop="asyncio", http="h11")
        self._forwarder = forwarder

    async def refuse(self) -> None:
        self._forwarder.refuses.set()
        await asyncio.sleep(CUT_S)
        self.force_exit = True
