"""Where the embedded server says what it is to peers."""

from __future__ import annotations

import msgspec
from fastapi import Depends, FastAPI, Response

from ...transfer.role_info import RoleInfo
from ..http.access import require_operator

__all__ = ["PATH", "add_role_route"]

PATH = "/kvcache/role"
"""For operators."""


def add_role_route(app: FastAPI, info: RoleInfo) -> None:
    """Only for servers with a role."""

    @app.get(PATH, dependencies=[Depends(require_operator)])
    async def role() -> Response:
        return Response(msgspec.json.encode(info), media_type="application/json")
