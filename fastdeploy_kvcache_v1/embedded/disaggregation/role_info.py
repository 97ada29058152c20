"""What a server with a role says about itself, so that `doctor` can tell whether two of them fit."""

from __future__ import annotations

import msgspec
from fastapi import Depends, FastAPI, Response

from ...transfer.geometry import Geometry
from ..http.access import require_operator

__all__ = ["PATH", "RoleInfo", "add_role_route"]

PATH = "/kvcache/role"


class RoleInfo(msgspec.Struct, forbid_unknown_fields=True):
    """The answer of `GET /kvcache/role`, for operators."""

    role: str
    plane: str
    host: str
    port: int | None
    """Where a decode server's worker listens for prefill servers; None for a prefill server."""
    plane_address: bytes
    """See `DataPlane.address`."""
    geometry: Geometry


def add_role_route(app: FastAPI, info: RoleInfo) -> None:
    """Only for servers with a role."""

    @app.get(PATH, dependencies=[Depends(require_operator)])
    async def role() -> Response:
        return Response(msgspec.json.encode(info), media_type="application/json")
