"""An answer given before the whole request has arrived must still reach its client."""

from __future__ import annotations

import anyio
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BYTES = 64 << 20
MAX_S = 5.0


class Linger:
    """ASGI middleware: reads and discards what is left of a body when its request has been answered.

    Otherwise the server closes the connection while the client still sends, and the reset that follows makes the
    client lose the answer. The rest is bounded: beyond `MAX_BYTES` or `MAX_S` the connection is cut.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        arrived = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers

        async def watched_receive() -> Message:
            nonlocal arrived
            message = await receive()
            arrived = arrived or not message.get("more_body", False)
            return message

        async def lingering_send(message: Message) -> None:
            if message["type"] == "http.response.start" and not arrived:
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if not is_last or arrived:
                await send(message)
                return
            await send({**message, "more_body": True})
            with anyio.move_on_after(MAX_S):
                await discard()
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        async def discard() -> None:
            left = MAX_BYTES
            while not arrived and left > 0:
                left -= len((await watched_receive()).get("body", b""))

        await self._app(scope, watched_receive, lingering_send)
