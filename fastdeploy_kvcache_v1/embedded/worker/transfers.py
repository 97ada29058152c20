"""The transfer desks of the worker process: which data plane, and over which memory."""

from __future__ import annotations

from dataclasses import dataclass

from ...transfer.control_link import Self
from ...transfer.geometry import Geometry
from ...transfer.plane import DataPlane
from ...transfer.rank_transfers import RankTransfers
from ...transfer.settings import PeerPort, TransferSettings
from ...transfer.socket_plane import SocketPlane
from ...worker.cache_controller import CacheController

__all__ = ["TransferConfig", "make_transfers"]


@dataclass(frozen=True, kw_only=True)
class TransferConfig:
    """Of a server with a role."""

    settings: TransferSettings
    address: PeerPort
    """Where rank 0 listens, 0 for a free port; the others on the ports behind. A decode server: for prefill servers; a
    prefill server: for reads.
    """
    is_decode: bool
    plane: str
    checksums: bool
    model: str
    """Digest of what decides the bytes of a block; the same on both sides."""
    num_kv_heads: int | None
    """Of the model, which its ranks share; None for a latent cache, which is whole on each."""

    def address_of(self, rank: int) -> PeerPort:
        port = self.address.port
        return self.address._replace(port=port + rank if port else 0)


def make_transfers(
    config: TransferConfig, controller: CacheController, block_size: int, *, rank: int = 0, num_ranks: int = 1
) -> RankTransfers:
    """Of one rank. Raises `ConfigError` when it cannot listen, or the plane does not work here."""
    regions = [rows for layer in controller.device_rows for rows in layer]
    address = config.address_of(rank)
    plane = _make_plane(config, address)
    try:
        plane.register(regions)
        geometry = Geometry.of(
            controller.layout,
            model=config.model,
            block_size=block_size,
            tp_size=num_ranks,
            tp_rank=rank,
            num_kv_heads=config.num_kv_heads,
        )
        return RankTransfers(
            Self(geometry, plane.address(), config.settings),
            plane,
            controller.device_hazards,
            listen=address if config.is_decode else None,
            # Both sides compare a digest of their memory, over the control link. A plane's own checksum finds accidents
            # at once; who changes bytes on the data connection can change it as well.
            regions=regions if config.checksums else (),
            names_come_once=True,  # each is a UUID
        )
    except BaseException:
        plane.close()
        raise


def _make_plane(config: TransferConfig, address: PeerPort) -> DataPlane:
    host, port = address
    if config.plane == "mooncake":
        from ...transfer.mooncake_plane import MooncakePlane  # only then its package is needed

        return MooncakePlane(host)
    # A decode server reads; its end of the plane serves nobody, and gets any port.
    return SocketPlane(host, config.settings.secret, port=0 if config.is_decode else port, checksums=config.checksums)
