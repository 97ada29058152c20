"""One request on its way: to a decode server, to another one where that does not answer, and back to the client."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable
from typing import TypeVar

import httpx
from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from ..embedded.api_error import ApiError, error_body
from ..embedded.prefill_job import PREFILL_HEADER, PROOF_HEADER, proof
from .servers import Server, ServerGroup

__all__ = ["Forwarder"]

T = TypeVar("T")

EVENTS = "text/event-stream"
CLIENT_CLOSED_REQUEST = 499
"""Status for the log only: no client reads it."""


class _LostError(Exception):
    """The server broke off, or stopped answering."""


class _GoneError(Exception):
    """The client went away."""


class Forwarder:
    """Event loop only. A server that breaks off before the answer has begun costs nothing but time: the request has
    changed nothing, and goes to the next one. Each server is tried once.
    """

    def __init__(self, http: httpx.AsyncClient, prefills: ServerGroup, decodes: ServerGroup, secret: bytes) -> None:
        self._http = http
        self._prefills = prefills
        self._decodes = decodes
        self._secret = secret

    async def forward(self, request: Request, body: bytes) -> Response:
        """The answer of a decode server. Raises `ApiError` when there is none."""
        tried: list[Server] = []
        reasons: list[str] = []
        gone = asyncio.ensure_future(_until_gone(request))
        try:
            while (decode := self._decodes.choose(tried)) is not None:
                tried.append(decode)
                try:
                    return await self._try(request, body, decode, gone)
                except _LostError as error:
                    reasons.append(f"{decode.url}: {error}")
        except _GoneError:
            raise ApiError(CLIENT_CLOSED_REQUEST, "the client closed the connection") from None
        finally:
            gone.cancel()
        if reasons:
            raise ApiError(502, f"no decode server finished the request: {'; '.join(reasons)}")
        raise ApiError(503, f"no decode server answers: {', '.join(each.url for each in self._decodes.servers)}")

    async def _try(self, request: Request, body: bytes, decode: Server, gone: asyncio.Task[None]) -> Response:
        load = contextlib.ExitStack()
        _count(load, decode)
        upstream = None
        try:
            outgoing = self._outgoing(request, body, decode, load)
            upstream = await _unless(self._http.send(outgoing, stream=True), decode, gone)
            headers = {"content-type": upstream.headers.get("content-type", "application/json")}
            if headers["content-type"].startswith(EVENTS):
                chunks = _chunks(upstream, decode, load.pop_all())
                return StreamingResponse(chunks, upstream.status_code, {**headers, "cache-control": "no-cache"})
            content = await _unless(upstream.aread(), decode, gone)
            await upstream.aclose()
            return Response(content, upstream.status_code, headers)
        except BaseException:
            if upstream is not None:
                await upstream.aclose()
            raise
        finally:
            load.close()

    def _outgoing(self, request: Request, body: bytes, decode: Server, load: contextlib.ExitStack) -> httpx.Request:
        headers = {"content-type": request.headers.get("content-type", "")}
        prefill = self._prefills.choose() if request.method == "POST" else None
        if prefill is not None:
            _count(load, prefill)
            headers |= {PREFILL_HEADER: prefill.url, PROOF_HEADER: proof(self._secret, "url", prefill.url.encode())}
        url = f"{decode.url}{request.url.path}"
        return self._http.build_request(request.method, url, content=body, headers=headers)


def _count(load: contextlib.ExitStack, server: Server) -> None:
    server.num_open += 1
    load.callback(_uncount, server)


def _uncount(server: Server) -> None:
    server.num_open -= 1


async def _unless(wanted: Awaitable[T], server: Server, gone: asyncio.Task[None] | None = None) -> T:
    """The result of `wanted`, unless the server is lost or the client gone before: `_LostError`, `_GoneError`."""
    task = asyncio.ensure_future(wanted)
    lost = asyncio.ensure_future(server.lost.wait())
    try:
        await asyncio.wait({task, lost} if gone is None else {task, lost, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if gone is not None and gone.done():
            raise _GoneError
        raise _LostError("it stopped answering")
    except httpx.ConnectError as error:
        server.set_alive(False, str(error))
        raise _LostError(str(error)) from None
    except httpx.HTTPError as error:
        raise _LostError(f"it broke off: {error or type(error).__name__}") from None
    finally:
        lost.cancel()
        if not task.done():
            task.cancel()
            with contextlib.suppress(BaseException):
                await task


async def _chunks(upstream: httpx.Response, decode: Server, load: contextlib.ExitStack) -> AsyncIterator[bytes]:
    """Events as they come; the last one is an error when the server is lost. The client's end ends the server's."""
    try:
        chunks = upstream.aiter_raw()
        while True:
            try:
                yield await _unless(anext(chunks), decode)
            except StopAsyncIteration:
                return
            except _LostError as error:
                text = json.dumps(error_body(502, f"{decode.url}: {error}; the answer is not complete"))
                yield f"\n\ndata: {text}\n\n".encode()
                return
    finally:
        load.close()
        await upstream.aclose()


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
