"""RankTransfers: both desks of one rank behind its worker's loop, whatever server the loop belongs to."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from ..errors import CacheStateError
from ..worker.hazards import HazardTable
from ..worker.ops.rows import BlockRows
from .control_link import Self
from .fetch import FetchResult
from .fetch_desk import FetchDesk
from .layer_progress import LayerProgress
from .network import SOCKETS, Network
from .offer_desk import LeaseEnd, OfferDesk
from .plane import DataPlane
from .rank_messages import CancelFetch, OpenLease, StartFetch, TransferCommand, TransferNews, WithdrawLease
from .settings import PeerPort

__all__ = ["RankTransfers"]


@dataclass(eq=False)
class _Leased:
    """A lease as the engine knows it, and on the desk one for each rank of the decode server."""

    command: OpenLease
    open_parts: set[str] = field(default_factory=set)
    """On the desk."""
    error: str | None = None
    """Why the first part ended that did not end well."""


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
        network: Network = SOCKETS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Owns `plane`, whose tensors are registered. `listen`: where prefill ranks connect to, for a decode rank.
        `regions`: this rank's tensors, where fetches end with a digest. `names_come_once`, `network`,
        `clock`: see `FetchDesk`. Raises `ConfigError` when it cannot listen.
        """
        self.geometry = geometry = ours.geometry
        self.plane_address = b"" if plane.address_is_secret else ours.address
        """For operators; empty where it is a secret."""
        self._plane = plane
        self.block_size = geometry.block_size
        """Tokens of a block."""
        self._offers = OfferDesk(ours, plane, hazards, regions=regions, network=network, clock=clock)
        self._fetches: FetchDesk | None = None
        if listen is not None:
            self._fetches = FetchDesk(
                ours,
                plane,
                hazards,
                *listen,
                regions=regions,
                names_come_once=names_come_once,
                network=network,
                clock=clock,
            )
        self._progress = LayerProgress(
            self._tell,
            num_layers=geometry.num_layers,
            layer_bytes=sum(role.block_bytes for role in geometry.roles),
        )
        self._leased: dict[str, _Leased] = {}
        """Open leases by request."""
        self._parts: dict[str, _Leased] = {}
        """The same by their open parts."""
        self._num_parts = 0
        """So far. Names of parts never repeat."""
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
                    self._withdraw(command)
                case StartFetch():
                    self._start(command)
                case CancelFetch():
                    if self._fetches is not None:
                        self._fetches.cancel(command.request_id, command.reason)
        self.turn()

    def begin_pass(self, ends: Iterable[tuple[str, int]]) -> None:
        """A pass computes these requests up to their `end` tokens; those without a lease are left out."""
        self._progress.begin(
            [(name, self._end_block(leased.command, end)) for name, end in ends if (leased := self._leased.get(name))]
        )

    def layer_begins(self, layer: int) -> None:
        """All layers before `layer` of the pass are written to memory (on a GPU: their events have passed)."""
        self._progress.reached(layer)
        self.turn()

    def end_pass(self, computed: Collection[str]) -> None:
        """The pass is over, well for the requests `computed`. The engine withdraws the leases of the others."""
        self._progress.finish(computed)
        self.turn()

    def turn(self) -> None:
        """Let both desks act on what has arrived and on deadlines."""
        while ends := self._offers.turn():
            for end in ends:
                self._part_ended(end)
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
        leased = _Leased(command)
        try:
            if command.request_id in self._leased:
                raise CacheStateError(f"lease {command.lease!r}: request {command.request_id!r} has one already")
            if not command.peers:
                raise CacheStateError(f"lease {command.lease!r} is offered to no rank of a decode server")
            for peer in command.peers:
                self._num_parts += 1
                part = str(self._num_parts)
                self._offers.open(part, command.request_id, command.slots, command.num_tokens, peer)
                self._parts[part] = leased
                leased.open_parts.add(part)
        except CacheStateError as error:  # before the first part: what is wrong with one is with all
            self._lease_ends.append(LeaseEnd(command.lease, command.request_id, str(error)))
            return
        self._leased[command.request_id] = leased

    def _withdraw(self, command: WithdrawLease) -> None:
        for part in [name for name, leased in self._parts.items() if leased.command.lease == command.lease]:
            self._offers.withdraw(part, command.reason)

    def _tell(self, request_id: str, end_block: int, end_layer: int) -> None:
        for part in self._leased[request_id].open_parts:
            self._offers.progress(part, end_block, end_layer)

    def _part_ended(self, end: LeaseEnd) -> None:
        """What a rank of the decode server cannot have, its other ranks have no use for."""
        leased = self._parts.pop(end.lease)
        leased.open_parts.discard(end.lease)
        if end.error is not None and leased.error is None:
            leased.error = end.error
            for part in leased.open_parts:
                self._offers.withdraw(part, end.error)
        if not leased.open_parts:
            del self._leased[end.request_id]
            self._progress.forget(end.request_id)
            self._lease_ends.append(LeaseEnd(leased.command.lease, end.request_id, leased.error))

    def _start(self, command: StartFetch) -> None:
        error = "got a fetch, but this server's role is not decode"
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

    def _end_block(self, command: OpenLease, end: int) -> int:
        """The block that the prompt's end is in counts once the prompt is complete."""
        return -(-end // self.block_size) if end >= command.num_tokens else end // self.block_size
