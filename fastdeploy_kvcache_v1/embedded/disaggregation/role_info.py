"""Where the embedded server says what it is to peers."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from fastapi import FastAPI, Response

from ...transfer.role_info import RankInfo, RoleInfo
from ..worker.messages import TransferEnd
from .settings import RoleSettings

__all__ = ["PATH", "add_role_route", "role_info"]

PATH = "/kvcache/role"


def role_info(settings: RoleSettings, ends: Sequence[TransferEnd]) -> RoleInfo:
    """`ends`: of the workers, by rank."""
    ranks = [RankInfo(end.port, end.plane_address, end.geometry) for end in ends]
    return RoleInfo(settings.role.value, settings.plane, settings.address.host, ranks)


def add_role_route(app: FastAPI, info: RoleInfo) -> None:
    """Only for servers with a role."""

    @app.get(PATH)
    async def role() -> Response:
        return Response(msgspec.json.encode(info), media_type="application/json")
