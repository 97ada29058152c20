"""RankTransfers: both desks of one rank behind its worker's loop, whatever server the loop belongs to."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from ..errors import CacheStateError
from ..worker.hazards import HazardTable
from ..worker.ops.rows import BlockRows
from .control_link import Self
from .fetch import FetchResult
from .fetch_desk import FetchDesk
from .layer_progress import LayerProgress
from .offer_desk import LeaseEnd, OfferDesk, PeerPort
from .plane import DataPlane
from .rank_messages import CancelFetch, OpenLease, StartFetch, TransferCommand, TransferNews, WithdrawLease

__all__ = ["RankTransfers"]


@dataclass(frozen=True)
class _Leased:
    lease: str
    num_tokens: int


class RankTransfers:
    """Owned by the thread that owns the slot table. Nothing blocks but what the desks say.

    The loop calls `handle` with what its engine says, `turn` as often as it can while `is_busy` and now and then
    otherwise, and sends `take_news` to its engine. Around a forward pass it calls `begin_pass`, `layer_begins` before
    each layer, and `end_pass`.

    A command that cannot be carried out is reported as a lease or a fetch that failed, and harms no other one.
    """

    def __init__(
        self,
        ours: Self,
        plane: DataPlane,
        hazards: HazardTable,
        *,
        listen: PeerPort | None = None,
        regions: Sequence[BlockRows] = (),
        names_come_once: bool = False,
    ) -> None:
        """Owns `plane`, whose tensors are registered. `listen`: where prefill ranks connect to, for a decode rank.
        `regions`: this rank's tensors, where fetches end with a digest. `names_come_once`: see `FetchDesk`. Raises
        `ConfigError` when it cannot listen.
        """
        self.geometry = geometry = ours.geometry
        self.plane_address = ours.address
        self._plane = plane
        self.block_size = geometry.block_size
        """Tokens of a block."""
        self._offers = OfferDesk(ours, plane, hazards, regions=regions)
        self._fetches: FetchDesk | None = None
        if listen is not None:
            once = names_come_once
            self._fetches = FetchDesk(ours, plane, hazards, *listen, regions=regions, names_come_once=once)
        self._progress = LayerProgress(
            self._offers.progress,
            num_layers=geometry.num_layers,
            layer_bytes=sum(role.block_bytes for role in geometry.roles),
        )
        self._leased: dict[str, _Leased] = {}
        """Open leases by request."""
        self._lease_ends: list[LeaseEnd] = []
        self._fetch_results: list[FetchResult] = []
        self._step = -1

    @property
    def port(self) -> int | None:
        """Where prefill ranks connect to; None where they cannot."""
        return None if self._fetches is None else self._fetches.port

    @property
    def is_busy(self) -> bool:
        """Something is open whose end the engine waits for, or a peer."""
        return bool(
            len(self._offers) or (self._fetches is not None and (len(self._fetches) or self._fetches.num_offers))
        )

    def handle(self, commands: Iterable[TransferCommand], *, step: int | None = None) -> None:
        """What the engine says, in its order, before the pass that its batch computes. `step`: the last swap step whose
        copies were submitted.
        """
        if step is not None:
            self._step = step
        for command in commands:
            match command:
                case OpenLease():
                    self._open(command)
                case WithdrawLease():
                    self._offers.withdraw(command.lease, command.reason)
                case StartFetch():
                    self._start(command)
                case CancelFetch():
                    if self._fetches is not None:
                        self._fetches.cancel(command.request_id, command.reason)
        self.turn()

    def begin_pass(self, ends: Iterable[tuple[str, int]]) -> None:
        """A pass computes these requests up to their `end` tokens; those without a lease are left out."""
        self._progress.begin(
            [(leased.lease, self._end_block(leased, end)) for name, end in ends if (leased := self._leased.get(name))]
        )

    def layer_begins(self, layer: int) -> None:
        """All layers before `layer` of the pass are written to memory (on a GPU: their events have passed)."""
        self._progress.reached(layer)
        self.turn()

    def end_pass(self, computed: Collection[str]) -> None:
        """The pass is over, well for the requests `computed`. The engine withdraws the leases of the others."""
        self._progress.finish([leased.lease for name in computed if (leased := self._leased.get(name))])
        self.turn()

    def turn(self) -> None:
        """Let both desks act on what has arrived and on deadlines."""
        for end in self._offers.turn():
            self._progress.forget(end.lease)
            if (leased := self._leased.get(end.request_id)) is not None and leased.lease == end.lease:
                del self._leased[end.request_id]
            self._lease_ends.append(end)
        if self._fetches is not None:
            self._fetch_results += self._fetches.turn(self._step)

    def take_news(self) -> TransferNews:
        """What ended since the last call."""
        news = TransferNews(tuple(self._lease_ends), tuple(self._fetch_results))
        self._lease_ends, self._fetch_results = [], []
        return news

    def close(self) -> None:
        """End every lease, fetch and link. When this returns, nobody touches the registered tensors. Idempotent."""
        self._offers.close()
        if self._fetches is not None:
            self._fetches.close()
        self.turn()
        self._plane.close()

    def check(self) -> None:
        """Raises `InvariantError`."""
        self._offers.check()
        if self._fetches is not None:
            self._fetches.check()

    def check_idle(self) -> None:
        """Raises `InvariantError` unless every lease and every fetch has ended and no offer is open."""
        self._offers.check_idle()
        if self._fetches is not None:
            self._fetches.check_idle()

    def _open(self, command: OpenLease) -> None:
        try:
            self._offers.open(command.lease, command.request_id, command.slots, command.num_tokens, command.peer)
        except CacheStateError as error:
            self._lease_ends.append(LeaseEnd(command.lease, command.request_id, str(error)))
            return
        self._leased[command.request_id] = _Leased(command.lease, command.num_tokens)

    def _start(self, command: StartFetch) -> None:
        error = "this server's role is not decode: it fetches nothing"
        if self._fetches is not None:
            try:
                self._fetches.fetch(
                    command.request_id, command.slots, first_block=command.first_block, after_step=command.after_step
                )
            except CacheStateError as refused:
                error = str(refused)
            else:
                return
        self._fetch_results.append(FetchResult(command.request_id, 0, 0.0, command.slots, error))

    def _end_block(self, leased: _Leased, end: int) -> int:
        """The block that the prompt's end is in counts once the prompt is complete."""
        return -(-end // self.block_size) if end >= leased.num_tokens else end // self.block_size
