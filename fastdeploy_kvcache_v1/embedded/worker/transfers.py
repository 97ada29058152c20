"""The transfer desks of the worker process: which data plane, and over which memory."""

from __future__ import annotations

from dataclasses import dataclass

from ...transfer.control_link import Self
from ...transfer.geometry import Geometry
from ...transfer.offer_desk import PeerPort
from ...transfer.plane import DataPlane
from ...transfer.rank_transfers import RankTransfers
from ...transfer.settings import TransferSettings
from ...transfer.socket_plane import SocketPlane
from ...worker.cache_controller import CacheController

__all__ = ["TransferConfig", "make_transfers"]


@dataclass(frozen=True, kw_only=True)
class TransferConfig:
    """Of a server with a role."""

    settings: TransferSettings
    address: PeerPort
    """Where it listens, 0 for a free port. A decode server: for prefill servers; a prefill server: for reads."""
    is_decode: bool
    plane: str
    checksums: bool
    model: str
    """Digest of what decides the bytes of a block; the same on both sides."""


def make_transfers(config: TransferConfig, controller: CacheController, block_size: int) -> RankTransfers:
    """Raises `ConfigError` when it cannot listen, or the plane does not work here."""
    regions = [rows for layer in controller.device_rows for rows in layer]
    plane = _make_plane(config)
    try:
        plane.register(regions)
        geometry = Geometry.of(controller.layout, model=config.model, block_size=block_size)
        return RankTransfers(
            Self(geometry, plane.address(), config.settings),
            plane,
            controller.device_hazards,
            listen=config.address if config.is_decode else None,
            # A plane without checksums of its own: both sides compare a digest of their memory.
            regions=regions if config.checksums and config.plane != "socket" else (),
        )
    except BaseException:
        plane.close()
        raise


def _make_plane(config: TransferConfig) -> DataPlane:
    host, port = config.address
    if config.plane == "mooncake":
        from ...transfer.mooncake_plane import MooncakePlane  # only then its package is needed

        return MooncakePlane(host)
    # A decode server reads; its end of the plane serves nobody, and gets any port.
    return SocketPlane(host, config.settings.secret, port=0 if config.is_decode else port, checksums=config.checksums)
