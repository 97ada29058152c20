"""PrefillRank: offers the blocks of each request to the decode server that its task names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...transfer.ledger import LeaseLedger
from ...transfer.offer_desk import PeerPort
from ...transfer.rank_messages import OpenLease, WithdrawLease
from ..task_kind import TaskKind
from .rank_channel import LeaseCounts
from .rank_role import RankRole
from .settings import RankPlace, TransferChoice
from .transfer_name import name_of


@dataclass(frozen=True)
class _Offer:
    """What a request's first task said."""

    name: str
    request_id: str
    slots: tuple[int, ...]


class PrefillRank(RankRole):
    """The task of a request opens its lease, and so comes before every pass that computes its blocks."""

    _name = "prefill"
    drops_rows_after_first_token = True

    def __init__(
        self,
        choice: TransferChoice,
        place: RankPlace,
        *,
        tell: Callable[[str, str | None], None],
        tell_counts: Callable[[LeaseCounts], None] = lambda counts: None,
        info_file: Path | None = None,
    ) -> None:
        """`tell(request_id, error)`: its transfer has ended. `tell_counts`: they are others than before."""
        super().__init__(choice, place, info_file)
        self._tell = tell
        self._tell_counts = tell_counts
        self._leases = LeaseLedger()
        self._has_news = False
        self._offers: dict[str, _Offer] = {}
        """Open ones, by request id."""
        self._last_names: dict[int, str] = {}
        """Of the transfers that were offered last, by row."""

    def insert(self, tasks: Sequence[Any]) -> None:
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
        if self._last_names.get(task.idx) == name:
            return  # a later chunk of one that has ended
        self._last_names[task.idx] = name
        if known is not None:
            self.failed(task.request_id, "another request has its id")
        self._offers[task.request_id] = _Offer(name, task.request_id, slots)
        ports = info["decode_rdma_ports"]
        if len(ports) != 1:
            self._end(name, f"a decode server with {len(ports)} ranks cannot read from this one")
            return
        peer = PeerPort(str(info["decode_ip"]), int(ports[0]))
        self._leases.open(name)
        self._has_news = True
        self.transfers.handle([OpenLease(name, name, slots, int(task.need_prefill_tokens), (peer,))])

    def turn(self, step: int) -> None:
        self.transfers.turn()
        for end in self.transfers.take_news().leases:
            self._leases.report(end)
            self._has_news = True
            self._end(end.lease, end.error)
        if self._has_news:
            self._has_news = False
            self._tell_counts(LeaseCounts(len(self._leases), replace(self._leases.totals)))

    def _end(self, name: str, error: str | None) -> None:
        for offer in [each for each in self._offers.values() if each.name == name]:
            del self._offers[offer.request_id]
            self._tell(offer.request_id, error)

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
            self._leases.withdraw(offer.name)
            self.transfers.handle([WithdrawLease(offer.name, reason)])
            self.turn(-1)
