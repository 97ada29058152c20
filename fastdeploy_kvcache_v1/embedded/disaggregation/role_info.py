"""What a server with a role says about itself, so that `doctor` can tell whether two of them fit."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from fastapi import Depends, FastAPI, Response

from ...transfer.geometry import Geometry
from ..http.access import require_operator
from ..worker.messages import TransferEnd
from .settings import RoleSettings

__all__ = ["PATH", "RankInfo", "RoleInfo", "add_role_route", "role_info"]

PATH = "/kvcache/role"


class RankInfo(msgspec.Struct, forbid_unknown_fields=True):
    """One worker of a server with a role."""

    port: int | None
    """Where a decode server's worker listens for prefill servers; None for a prefill server."""
    plane_address: bytes
    """See `DataPlane.address`."""
    geometry: Geometry


class RoleInfo(msgspec.Struct, forbid_unknown_fields=True):
    """The answer of `GET /kvcache/role`, for operators."""

    role: str
    plane: str
    host: str
    ranks: list[RankInfo]


def role_info(settings: RoleSettings, ends: Sequence[TransferEnd]) -> RoleInfo:
    """`ends`: of the workers, by rank."""
    ranks = [RankInfo(end.port, end.plane_address, end.geometry) for end in ends]
    return RoleInfo(settings.role.value, settings.plane, settings.address.host, ranks)


def add_role_route(app: FastAPI, info: RoleInfo) -> None:
    """Only for servers with a role."""

    @app.get(PATH, dependencies=[Depends(require_operator)])
    async def role() -> Response:
        return Response(msgspec.json.encode(info), media_type="application/json")
