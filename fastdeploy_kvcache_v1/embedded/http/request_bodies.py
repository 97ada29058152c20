"""How much clients may send, and how slowly. Neither uvicorn nor Starlette bounds a body."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from fastapi import Request
from starlette.requests import ClientDisconnect

from ...units import MIB
from ..api_error import ApiError

FREE_BYTES = 64 * 1024
"""Of every body that do not count against the room for all of them: short requests are served even while long ones are
refused. uvicorn reads as much ahead anyway."""

BODIES_IN_ALL = 4
"""Largest bodies for which there is room at the same time."""

BODY_TIMEOUT_S = 20.0
LEAST_BYTES_PER_S = 128 * 1024
"""A body may take longer than `BODY_TIMEOUT_S` by what it needs at this rate."""


class BodyRoom:
    """Memory for bodies that are being received, or wait to be read. Event loop only."""

    def __init__(self, max_mib: float) -> None:
        self._max_mib = max_mib
        self._max_bytes = int(max_mib * MIB)
        self._free = BODIES_IN_ALL * self._max_bytes

    @property
    def held(self) -> int:
        """Bytes of all bodies beyond the first `FREE_BYTES` of each."""
        return BODIES_IN_ALL * self._max_bytes - self._free

    @asynccontextmanager
    async def body(self, request: Request) -> AsyncIterator[bytearray]:
        """The whole body of `request`, in memory as long as it is entered.

        Raises `ApiError`: 413 for a body that is too large, unread where its length was declared; 408 for one that
        comes too slowly; 503 where there is no room.
        """
        taken = 0
        try:
            declared = request.headers.get("content-length", "")
            self._require_small(int(declared) if declared.isdecimal() else 0)
            body = bytearray()
            allowed = BODY_TIMEOUT_S
            started = anyio.current_time()
            try:
                with anyio.fail_after(allowed) as limit:
                    async for chunk in request.stream():
                        self._require_small(len(body) + len(chunk))
                        body += chunk
                        taken += self._take(max(len(body) - FREE_BYTES - taken, 0))
                        allowed = BODY_TIMEOUT_S + len(body) / LEAST_BYTES_PER_S
                        limit.deadline = started + allowed
            except TimeoutError:
                raise ApiError(408, f"the request body did not arrive within {allowed:.0f} s: send it faster") from None
            except ClientDisconnect:
                raise ApiError(499, "the client closed the connection") from None
            yield body
        finally:
            self._free += taken

    def _require_small(self, size: int) -> None:
        if size > self._max_bytes:
            raise ApiError(413, f"the request body is larger than --max-request-mib {self._max_mib:g}: shorten it")

    def _take(self, size: int) -> int:
        if size > self._free:
            raise ApiError(503, "the server is receiving too many large requests: try again later")
        self._free -= size
        return size
