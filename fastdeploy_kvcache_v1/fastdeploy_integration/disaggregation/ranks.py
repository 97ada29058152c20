"""The transfers of a worker rank, in either role."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...transfer.control_link import Self
from ...transfer.geometry import Geometry
from ...transfer.offer_desk import LeaseEnd
from ...transfer.rank_messages import COMMANDS, OpenLease, TransferCommand, WithdrawLease
from ...transfer.rank_transfers import RankTransfers
from ...transfer.role_info import RankInfo
from ...transfer.settings import PeerPort
from ...worker.cache_controller import CacheController
from ..transport import TaskKind
from .leases import LeaseOpened, LeaseWithdrawn
from .settings import RankPlace, TransferChoice, rank_place, transfer_choice
from .transfer_name import name_of

MAX_NAMES = 4096
"""Of transfers, remembered: many times the seats of a server."""


@dataclass(frozen=True)
class RankShape:
    """What the controller does not know of its blocks."""

    block_size: int
    num_kv_heads: int | None
    """Of the whole model; None for latent caches, which are not split."""
    tp_size: int
    tp_rank: int


class RankRole:
    """What a worker's loop, which owns it, tells its rank's transfers. Nothing blocks but what the desks say."""

    drops_rows_after_first_token = False
    """Whether a sequence ends here with its first token."""
    _listens = False

    def __init__(self, choice: TransferChoice, place: RankPlace, tell: Callable[[object], None]) -> None:
        """`tell` sends to the engine."""
        self._choice, self._place, self._tell = choice, place, tell
        self._commands: deque[TransferCommand] = deque()
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
        self._tell(RankInfo(self._transfers.port, self._transfers.plane_address, geometry))

    def let_go(self) -> None:
        """The caches are about to lose their memory: leases, fetches and links end. Idempotent."""
        if self._transfers is not None:
            self._transfers.close()
            self._tell_ended()
            self._transfers = None

    def hear(self, command: TransferCommand) -> None:
        """Keep what the engine says for the next turn. Any thread."""
        self._commands.append(command)

    @property
    def handlers(self) -> dict[type, Callable[[Any], None]]:
        """Of what the engine says, by type."""
        return dict.fromkeys(COMMANDS, self.hear)

    def _take_commands(self) -> list[TransferCommand]:
        return [self._commands.popleft() for _ in range(len(self._commands))]

    @property
    def is_in_use(self) -> bool:
        """Whether there are caches."""
        return self._transfers is not None

    @property
    def transfers(self) -> RankTransfers:
        assert self._transfers is not None, "the caches come first"
        return self._transfers

    def insert(self, tasks: Sequence[Any]) -> None:
        """A batch of FastDeploy's tasks has come, before anything of it is computed."""

    def _tell_ended(self) -> None:
        """Tell the engine of leases or fetches that have ended."""
        raise NotImplementedError

    def turn(self, step: int) -> None:
        """As often as the loop can. `step`: the last swap step whose copies were submitted; sequences that its batch
        ended are computed no more.
        """
        raise NotImplementedError

    def begin_pass(self, ends: Iterable[tuple[str, int]]) -> None:
        """A pass computes these requests, each up to so many tokens."""

    def layer_begins(self, layer: int) -> None:
        """All layers before `layer` of the pass are in memory."""

    def end_pass(self, computed: Collection[str]) -> None:
        """The pass is over, well for these requests."""

    def failed(self, request_id: str, reason: str) -> None:
        """What was computed of a request does not count any more."""


@dataclass(frozen=True)
class _Offer:
    """What a request's first task said."""

    name: str
    request_id: str
    slots: tuple[int, ...]


class PrefillRank(RankRole):
    """Offers the blocks of each request to the decode server that its task names.

    The task opens the lease, and so comes before every pass that computes the blocks.
    """

    drops_rows_after_first_token = True

    def __init__(self, *args: Any) -> None:
        """See `RankRole`."""
        super().__init__(*args)
        self._offers: dict[str, _Offer] = {}
        """Open ones, by request id."""
        self._names: dict[str, None] = {}
        """Of the last transfers that were offered, whatever became of them."""

    def insert(self, tasks: Sequence[Any]) -> None:
        if not self.is_in_use:  # FastDeploy was told to go on while it sleeps
            for task in tasks:
                self._refuse(task)
            return
        for task in tasks:
            if task.task_type.value == TaskKind.PREFILL:
                self._offer(task)
            elif task.task_type.value in (TaskKind.PREEMPTED, TaskKind.ABORT):
                self.failed(task.request_id, "the prefill server gave the request up")
        self.turn(-1)

    def _offer(self, task: Any) -> None:
        name, info = name_of(task), task.disaggregate_info
        if name is None or info is None:
            return  # FastDeploy waits for no transfer of it
        block_size = self.transfers.block_size
        slots = tuple(int(slot) for slot in task.block_tables[: -(-task.need_prefill_tokens // block_size)])
        written = set(slots[task.prefill_start_index // block_size :])
        for offer in list(self._offers.values()):
            if offer.name != name and not written.isdisjoint(offer.slots):
                self.failed(offer.request_id, "its blocks were given to another request")
        known = self._offers.get(task.request_id)
        if known is not None and known.name == name:
            if known.slots != slots:
                self.failed(task.request_id, "it was given other blocks")
            return
        if not self._is_new(name):
            return  # a later task of one that has ended
        if known is not None:
            self.failed(task.request_id, "another request has its id")
        self._offers[task.request_id] = _Offer(name, task.request_id, slots)
        self._tell(LeaseOpened(name, task.request_id))
        host = str(info["decode_ip"])
        peers = tuple(PeerPort(host, int(port)) for port in info["decode_rdma_ports"])
        self.transfers.handle([OpenLease(name, name, slots, int(task.need_prefill_tokens), peers)])

    def _refuse(self, task: Any) -> None:
        name = name_of(task) if task.task_type.value == TaskKind.PREFILL else None
        if name is not None and task.disaggregate_info is not None and self._is_new(name):
            self._tell(LeaseOpened(name, task.request_id))
            self._tell(LeaseEnd(name, task.request_id, "the prefill server sleeps"))

    def _is_new(self, name: str) -> bool:
        if name in self._names:
            return False
        self._names[name] = None
        if len(self._names) > MAX_NAMES:
            del self._names[next(iter(self._names))]
        return True

    def turn(self, step: int) -> None:
        self.transfers.handle(self._take_commands())
        self._tell_ended()

    def _tell_ended(self) -> None:
        for end in self.transfers.take_news().leases:
            self._end(end)

    def _end(self, end: LeaseEnd) -> None:
        for offer in [each for each in self._offers.values() if each.name == end.lease]:
            del self._offers[offer.request_id]
        self._tell(end)

    def begin_pass(self, ends: Iterable[tuple[str, int]]) -> None:
        self.transfers.begin_pass(
            [(self._offers[request_id].name, end) for request_id, end in ends if request_id in self._offers]
        )

    def layer_begins(self, layer: int) -> None:
        self.transfers.layer_begins(layer)

    def end_pass(self, computed: Collection[str]) -> None:
        self.transfers.end_pass([self._offers[each].name for each in computed if each in self._offers])

    def failed(self, request_id: str, reason: str) -> None:
        if (offer := self._offers.get(request_id)) is not None:
            self._tell(LeaseWithdrawn(offer.name))
            self.transfers.handle([WithdrawLease(offer.name, reason)])
            self.turn(-1)


class DecodeRank(RankRole):
    """Fills the blocks that its engine has given to requests.

    Sequences start with their first token: what is computed here is nothing that a peer reads.
    """

    _listens = True

    def turn(self, step: int) -> None:
        self.transfers.handle(self._take_commands(), step=step)
        self._tell_ended()

    def _tell_ended(self) -> None:
        news = self.transfers.take_news()
        if news:
            self._tell(news)


RANKS: dict[str, type[RankRole]] = {"prefill": PrefillRank, "decode": DecodeRank}
"""By `--splitwise-role`."""


def rank_role(config: Any, tell: Callable[[object], None]) -> RankRole | None:
    """Of the rank that an `FDConfig` describes; None in a mixed server. Raises `ConfigError`."""
    role = config.scheduler_config.splitwise_role
    return None if role == "mixed" else RANKS[role](transfer_choice(), rank_place(), tell)
