"""What a server with a role says about itself, so that `doctor` can tell whether two of them fit."""

from __future__ import annotations

import msgspec

from .geometry import Geometry

__all__ = ["PATH", "RankInfo", "RoleInfo"]

PATH = "/kvcache/role"
"""Of the embedded server."""


class RankInfo(msgspec.Struct, forbid_unknown_fields=True):
    """One worker of a server with a role."""

    port: int | None
    """Where a decode server's worker listens for prefill servers; None for a prefill server."""
    plane_address: bytes
    """See `DataPlane.address`; empty where that is a secret."""
    geometry: Geometry


class RoleInfo(msgspec.Struct, forbid_unknown_fields=True):
    """As JSON the answer of `GET /kvcache/role` in the embedded server, and a file in the logs of a FastDeploy one."""

    role: str
    plane: str
    host: str
    ranks: list[RankInfo]
