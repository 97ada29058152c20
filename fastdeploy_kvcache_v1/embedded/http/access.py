"""Which requests are served: a web page in a browser that can reach the server must not use it.

A page of another site can send "simple" requests only: without a JSON content type, and without headers of its own.
Under a name that points to this machine (DNS rebinding) it could send any, but then the `Host` header names it.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence

from fastapi import Request
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ..api_error import ApiError, error_body

OPERATOR_HEADER = "X-KVCache-Operator"

_HOST = re.compile(r"(\[[^\]]*\]|[^:]*)(?::\d*)?")
_JSON = re.compile(r"\s*application/(?:[\w.-]+\+)?json\s*(?:[;,].*)?", re.IGNORECASE | re.DOTALL)


class HostCheck:
    """ASGI middleware: a request whose `Host` header names another server gets HTTP 403.

    Addresses are always right (a page cannot rebind one), and so are localhost, this machine's name and the name that
    the server listens on. "*" allows all.
    """

    def __init__(self, app: ASGIApp, host: str, allowed_hosts: Sequence[str] = ()) -> None:
        self._app = app
        self._allows_all = "*" in allowed_hosts
        self._names = {_plain(name) for name in ("localhost", socket.gethostname(), host, *allowed_hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        named = Headers(scope=scope).get("host") if scope["type"] == "http" else None
        if named is None or self._is_ours(named):
            await self._app(scope, receive, send)
            return
        message = (
            f"the Host header names {named!r}, which is not this server: start it with --allowed-hosts to add the name"
        )
        await JSONResponse(error_body(403, message), 403)(scope, receive, send)

    def _is_ours(self, named: str) -> bool:
        found = _HOST.fullmatch(named)
        if self._allows_all or found is None:
            return self._allows_all
        name = _plain(found.group(1))
        return name in self._names or name.endswith(".localhost") or _is_address(name)


def require_json(request: Request) -> None:
    """Raises `ApiError` for a body that is not declared as JSON."""
    declared = request.headers.get("content-type", "")
    if not _JSON.fullmatch(declared):
        raise ApiError(415, f"the content type must be application/json, got {declared!r}")


async def require_operator(request: Request) -> None:
    """Raises `ApiError` for a request without the header that operators send."""
    if OPERATOR_HEADER not in request.headers:
        raise ApiError(403, f"this endpoint is for operators: send the header {OPERATOR_HEADER}: 1")


def listens_beyond_this_machine(host: str) -> bool:
    """`host` is the address of the listening socket."""
    return not ipaddress.ip_address(host.partition("%")[0]).is_loopback


def _plain(name: str) -> str:
    return name.strip("[]").rstrip(".").lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
