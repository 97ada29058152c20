"""How much a client may send. Neither uvicorn nor Starlette bounds a JSON body: it would be read into memory whole."""

from __future__ import annotations

from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MIB = 1 << 20


class BodyLimit:
    """ASGI middleware: who reads the body of a request that is larger than `max_mib` gets HTTP 413.

    A body of declared length is refused unread, one without (chunked) as soon as it has grown too large.
    """

    def __init__(self, app: ASGIApp, max_mib: float) -> None:
        self._app = app
        self._max_mib = max_mib

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        expected = int(declared) if declared.isdecimal() else 0
        received = 0

        async def receive_within_limit() -> Message:
            nonlocal received
            self._check(expected)
            message = await receive()
            received += len(message.get("body", b""))
            self._check(received)
            return message

        await self._app(scope, receive_within_limit, send)

    def _check(self, size: int) -> None:
        if size > self._max_mib * MIB:
            message = f"the request body is larger than --max-request-mib {self._max_mib:g}"
            # Closed, for the rest of the body is never read. FastAPI's own type, which its body parser lets pass.
            raise HTTPException(413, message, headers={"connection": "close"})
