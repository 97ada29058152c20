"""PrefillRank: offers the blocks of each request to the decode server that its task names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...transfer.offer_desk import LeaseEnd
from ...transfer.rank_messages import OpenLease, WithdrawLease
from ...transfer.settings import PeerPort
from ..task_kind import TaskKind
from .leases import LeaseOpened, LeaseWithdrawn
from .rank_role import RankRole
from .transfer_name import name_of

MAX_NAMES = 4096
"""Of transfers, remembered: many times the seats of a server."""


@dataclass(frozen=True)
class _Offer:
    """What a request's first task said."""

    name: str
    request_id: str
    slots: tuple[int, ...]


class PrefillRank(RankRole):
    """The task of a request opens its lease, and so comes before every pass that computes its blocks."""

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
        self._channel.tell(LeaseOpened(name, task.request_id))
        host = str(info["decode_ip"])
        peers = tuple(PeerPort(host, int(port)) for port in info["decode_rdma_ports"])
        self.transfers.handle([OpenLease(name, name, slots, int(task.need_prefill_tokens), peers)])

    def _refuse(self, task: Any) -> None:
        name = name_of(task) if task.task_type.value == TaskKind.PREFILL else None
        if name is not None and task.disaggregate_info is not None and self._is_new(name):
            self._channel.tell(LeaseOpened(name, task.request_id))
            self._channel.tell(LeaseEnd(name, task.request_id, "the prefill server sleeps"))

    def _is_new(self, name: str) -> bool:
        if name in self._names:
            return False
        self._names[name] = None
        if len(self._names) > MAX_NAMES:
            del self._names[next(iter(self._names))]
        return True

    def turn(self, step: int) -> None:
        self.transfers.handle(self._channel.take())
        self._tell_ended()

    def _tell_ended(self) -> None:
        for end in self.transfers.take_news().leases:
            self._end(end)

    def _end(self, end: LeaseEnd) -> None:
        for offer in [each for each in self._offers.values() if each.name == end.lease]:
            del self._offers[offer.request_id]
        self._channel.tell(end)

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
            self._channel.tell(LeaseWithdrawn(offer.name))
            self.transfers.handle([WithdrawLease(offer.name, reason)])
            self.turn(-1)
