"""A worker process's ways to the outside: its storage agent and its transfer desks."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ....link.rank import RankLink
from ....storage.attention_store.agent import AttentionStoreAgent
from ....storage.attention_store.sdk import DeviceCaches
from ....storage.host_memory import RankMemory
from ....storage.namespace import Namespace
from ....storage.seal import TRAILER_BYTES
from ....storage.settings import StorageSettings
from ....transfer.control_link import Self
from ....transfer.geometry import Geometry
from ....transfer.plane import DataPlane
from ....transfer.rank_transfers import RankTransfers
from ....transfer.settings import PeerPort
from ....transfer.socket_plane import SocketPlane
from ....worker.cache_controller import CacheController
from ...model.ranks import Ranks
from ..disaggregation.settings import Role, RoleSettings
from .messages import LINK_TYPES

__all__ = ["RankStorage", "digest_of", "host_trailer_bytes", "make_transfers"]


def host_trailer_bytes(settings: StorageSettings | None) -> int:
    """Bytes behind each host slot for the checksum of a stored block."""
    return 0 if settings is None or settings.uses_device_tier else TRAILER_BYTES


class RankStorage:
    """Gives the memory of the tiers to the store: to the store process over the link, or to the store's agent here."""

    def __init__(
        self,
        settings: StorageSettings,
        link: Path,
        ranks: Ranks,
        controller: CacheController,
        namespace: Namespace | None,
    ) -> None:
        """`link`: see `WorkerLaunch`. Raises `ConfigError` or `StorageError` for an unusable store."""
        self._link = RankLink(link, ranks.rank, ranks.size, LINK_TYPES, word=link.parent.name)
        self._agent: AttentionStoreAgent | None = None
        if settings.uses_device_tier:
            self._agent = AttentionStoreAgent(self._link.send, rank=ranks.rank)
            transfers = controller.transfers
            self._agent.use(
                DeviceCaches.over(transfers.device_rows, late_writes=transfers.late_writes, refilled=transfers.refilled)
            )
            assert namespace is not None, "where there is storage there is a namespace"
            self._agent.connect(namespace)
            self._link.listen(self._agent.handlers)
            return
        pool = controller.host_pool
        assert pool.buffer.file is not None, "it was made to be shared"
        memory = RankMemory(self._link)
        self._link.listen(memory.handlers)
        memory.use(pool.buffer.file, pool.num_blocks, pool.slot_bytes)

    def close(self) -> bool:
        """Returns False if the store hangs: it may still use the memory of the device tier."""
        is_quiet = self._agent is None or self._agent.close()
        self._link.close()
        return is_quiet


def digest_of(namespace: Namespace) -> str:
    """Digest of all that decides a block's bytes. Both sides of a transfer must have the same."""
    return hashlib.sha256(f"{namespace.model} {namespace.implementation}".encode()).hexdigest()[:32]


def make_transfers(
    role: RoleSettings,
    controller: CacheController,
    *,
    block_size: int,
    model: str,
    num_kv_heads: int | None,
    rank: int = 0,
    num_ranks: int = 1,
) -> RankTransfers:
    """Transfers of one rank. `model`: see `digest_of`. `num_kv_heads` of all ranks; None for a latent cache, whole on
    each. Raises `ConfigError` when it cannot listen, or the plane does not work here.
    """
    regions = [rows for layer in controller.transfers.device_rows for rows in layer]
    address = role.address_of(rank)
    plane = _make_plane(role, address)
    try:
        plane.register(regions)
        geometry = Geometry.of(
            controller.layout,
            model=model,
            block_size=block_size,
            tp_size=num_ranks,
            tp_rank=rank,
            num_kv_heads=num_kv_heads,
        )
        return RankTransfers(
            Self(geometry, plane.address(), role.transfer),
            plane,
            controller.transfers.device_hazards,
            listen=address if role.role is Role.DECODE else None,
            # Both sides compare a digest of their memory, over the control link. A plane's own checksum finds accidents
            # at once; who changes bytes on the data connection can change it as well.
            regions=regions if role.checksums else (),
            names_come_once=True,  # each is a UUID
        )
    except BaseException:
        plane.close()
        raise


def _make_plane(role: RoleSettings, address: PeerPort) -> DataPlane:
    host, port = address
    if role.plane == "mooncake":
        from ....transfer.mooncake_plane import MooncakePlane  # only then its package is needed

        return MooncakePlane(host)
    # A decode server only reads: its end of the plane serves no reader, and gets any port.
    port = 0 if role.role is Role.DECODE else port
    return SocketPlane(host, role.transfer.secret, port=port, checksums=role.checksums)
