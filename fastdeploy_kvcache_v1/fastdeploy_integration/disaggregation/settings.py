"""What the user says about transfers, and what the engine tells its workers: all by the environment."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ...config import one_of
from ...errors import ConfigError
from ...transfer.cuda_ipc_plane import CudaIpcPlane
from ...transfer.mooncake_plane import MooncakePlane
from ...transfer.plane import DataPlane
from ...transfer.secret_file import read_secret
from ...transfer.settings import TransferSettings
from ...transfer.socket_plane import SocketPlane

SECRET_FILE = "FASTDEPLOY_KVCACHE_PEER_SECRET_FILE"
"""Path of a file whose content all prefill and decode servers share."""

PLANE = "FASTDEPLOY_KVCACHE_TRANSFER_PLANE"
LIMITS = "FASTDEPLOY_KVCACHE_TRANSFER_LIMITS"
"""JSON object: seconds by name, see `TransferSettings`, and whether fetches end with a digest."""

RANK = "FD_KVCACHE_V1_TRANSFER_RANK"
"""What the engine tells its workers; not for users."""

CUDA_IPC = "cuda_ipc"

PLANES = ("socket", "mooncake", CUDA_IPC)


@dataclass(frozen=True)
class TransferChoice:
    """What the user chose. Raises `ConfigError`."""

    settings: TransferSettings
    plane: str
    digest: bool
    """Whether both sides of a fetch make a digest from their own memory, where that is on the CPU."""

    def open_plane(self, host: str) -> DataPlane:
        """Raises `ConfigError`."""
        if self.plane == "mooncake":
            return MooncakePlane(host)
        if self.plane == CUDA_IPC:
            return CudaIpcPlane()
        return SocketPlane(host, self.settings.secret, checksums=self.digest)


@dataclass(frozen=True)
class RankPlace:
    """Where the ranks of a server are, and what their blocks mean."""

    host: str
    """Of this machine, as peers reach it."""
    ports: tuple[int, ...]
    """Where each decode rank listens."""
    model: str
    """See `Geometry.model`."""


def transfer_choice(environment: Mapping[str, str] = os.environ) -> TransferChoice:
    """Raises `ConfigError`."""
    plane = environment.get(PLANE, PLANES[0])
    one_of(PLANE, PLANES, plane)
    limits = _limits(environment.get(LIMITS, "{}"))
    digest = limits.pop("digest", True)
    return TransferChoice(TransferSettings(secret=_secret(environment), **limits), plane, digest is True)


def _secret(environment: Mapping[str, str]) -> bytes:
    path = environment.get(SECRET_FILE)
    if not path:
        raise ConfigError(
            "prefill and decode servers share a secret: write one to a file that only you can read "
            f"(`openssl rand -hex 16`), and set {SECRET_FILE} to its path, on every server"
        )
    return read_secret(Path(path))


def _limits(text: str) -> dict[str, Any]:
    known = {each.name for each in fields(TransferSettings) if each.name.endswith("_s")} | {"digest"}
    try:
        limits = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{LIMITS} is not JSON ({error}): give an object of {', '.join(sorted(known))}") from None
    if not isinstance(limits, dict) or not limits.keys() <= known:
        raise ConfigError(f"got {LIMITS}={text}: give an object of {', '.join(sorted(known))}")
    if bad := [
        name for name, value in limits.items() if not isinstance(value, bool if name == "digest" else (int, float))
    ]:
        raise ConfigError(f"got {LIMITS}={text}: {', '.join(bad)} must be a number of seconds, digest true or false")
    return limits


def export(place: RankPlace, environment: MutableMapping[str, str] = os.environ) -> None:
    """Let the workers started from here on know."""
    environment[RANK] = json.dumps(asdict(place))


def rank_place(environment: Mapping[str, str] = os.environ) -> RankPlace:
    """In a worker. Raises `ConfigError` where no engine has exported it."""
    exported = environment.get(RANK)
    if not exported:
        raise ConfigError(f"got no {RANK}, expected this worker's role from the engine in it: report this")
    place = json.loads(exported)
    return RankPlace(place["host"], tuple(place["ports"]), place["model"])
