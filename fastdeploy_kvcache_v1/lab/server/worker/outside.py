"""A worker process's ways to the outside: its storage agent and its transfer desks."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ....link.messages import MessageTypes
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
from ..disaggregation.settings import Role, RoleSettings

__all__ = ["digest_of", "give_device_memory", "give_host_memory", "host_trailer_bytes", "make_agent", "make_transfers"]


def make_agent(settings: StorageSettings | None, addresses: tuple[str, str], rank: int) -> AttentionStoreAgent | None:
    """`addresses` for its commands and its answers; `rank` of its worker."""
    if settings is None or not settings.uses_device_tier:
        return None
    return AttentionStoreAgent(*addresses, rank=rank)


def host_trailer_bytes(settings: StorageSettings | None) -> int:
    """Bytes behind each host slot for the checksum of a stored block."""
    return 0 if settings is None or settings.uses_device_tier else TRAILER_BYTES


def give_device_memory(agent: AttentionStoreAgent, controller: CacheController, namespace: Namespace | None) -> None:
    """Raises `ConfigError` or `StorageError` for an unusable store."""
    assert namespace is not None, "where there is storage there is a namespace"
    agent.use(
        DeviceCaches.over(
            controller.transfers.device_rows,
            late_writes=controller.transfers.late_writes,
            refilled=controller.transfers.refilled,
        )
    )
    agent.connect(namespace)


def give_host_memory(path: Path, rank: int, num_ranks: int, controller: CacheController) -> RankLink:
    """To the store process, over the link at `path`, for as long as that is open."""
    pool = controller.host_pool
    assert pool.buffer.file is not None, "it was made to be shared"
    link = RankLink(path, rank, num_ranks, MessageTypes(), word=path.parent.name)
    memory = RankMemory(link)
    link.listen(memory.handlers)
    memory.use(pool.buffer.file, pool.num_blocks, pool.slot_bytes)
    return link


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
