"""RankRole: what a worker's loop tells its rank's transfers, in either role."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...transfer.control_link import Self
from ...transfer.geometry import Geometry
from ...transfer.rank_transfers import RankTransfers
from ...transfer.role_info import RankInfo
from ...transfer.settings import PeerPort
from ...worker.cache_controller import CacheController
from .rank_channel import RankEnd
from .settings import RankPlace, TransferChoice


@dataclass(frozen=True)
class RankShape:
    """What the controller does not know of its blocks."""

    block_size: int
    num_kv_heads: int | None
    """Of the whole model; None for latent caches, which are not split."""
    tp_size: int
    tp_rank: int


class RankRole(ABC):
    """The worker's loop owns it. Nothing blocks but what the desks say."""

    drops_rows_after_first_token = False
    """Whether a sequence ends here with its first token."""
    _listens = False

    def __init__(self, choice: TransferChoice, place: RankPlace, channel: RankEnd) -> None:
        self._choice, self._place, self._channel = choice, place, channel
        self._transfers: RankTransfers | None = None

    def use(self, controller: CacheController, shape: RankShape) -> None:
        """The caches are there, at the start and after `let_go`, when peers meet another instance: the engine hears of
        it. Raises `ConfigError`.
        """
        regions = [rows for layer in controller.transfers.device_rows for rows in layer]
        plane = self._choice.open_plane(self._place.host)
        plane.register(regions)
        geometry = Geometry.of(
            controller.layout,
            model=self._place.model,
            block_size=shape.block_size,
            tp_size=shape.tp_size,
            tp_rank=shape.tp_rank,
            num_kv_heads=shape.num_kv_heads,
        )
        self._transfers = RankTransfers(
            Self(geometry, plane.address(), replace(self._choice.settings, instance=os.urandom(16).hex())),
            plane,
            controller.transfers.device_hazards,
            listen=PeerPort(self._place.host, self._place.ports[shape.tp_rank]) if self._listens else None,
            regions=regions if self._choice.digest and not regions[0].on_gpu else (),
            names_come_once=True,
        )
        self._channel.tell(RankInfo(self._transfers.port, self._transfers.plane_address, geometry))

    def let_go(self) -> None:
        """The caches are about to lose their memory: leases, fetches and links end. Idempotent."""
        if self._transfers is not None:
            self._transfers.close()
            self._tell_ended()
            self._transfers = None

    @property
    def is_in_use(self) -> bool:
        """Whether there are caches."""
        return self._transfers is not None

    @property
    def transfers(self) -> RankTransfers:
        assert self._transfers is not None, "the caches come first"
        return self._transfers

    @abstractmethod
    def insert(self, tasks: Sequence[Any]) -> None:
        """A batch of FastDeploy's tasks has come, before anything of it is computed."""

    @abstractmethod
    def _tell_ended(self) -> None:
        """Tell the engine of leases or fetches that have ended."""

    @abstractmethod
    def turn(self, step: int) -> None:
        """As often as the loop can. `step`: the last swap step whose copies were submitted; sequences that its batch
        ended are computed no more.
        """

    @abstractmethod
    def begin_pass(self, ends: Iterable[tuple[str, int]]) -> None:
        """A pass computes these requests, each up to so many tokens."""

    @abstractmethod
    def layer_begins(self, layer: int) -> None:
        """All layers before `layer` of the pass are in memory."""

    @abstractmethod
    def end_pass(self, computed: Collection[str]) -> None:
        """The pass is over, well for these requests."""

    @abstractmethod
    def failed(self, request_id: str, reason: str) -> None:
        """What was computed of a request does not count any more."""
