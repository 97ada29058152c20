"""OfferDesk: the prefill rank's leases. Each holds its blocks for one decode rank, and always ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..errors import CacheStateError, InvariantError, KVCacheError
from ..worker.hazards import Actor, HazardTable
from ..worker.ops.rows import BlockRows
from ..worker.runtime.cpu import CpuEvent
from .control_link import ControlLink, Inbox, LinkClosed, LinkOpened, Self
from .digest import source_digest
from .messages import Done, Message, Offer, Ping, Progress, Settled, Withdraw, require_sendable
from .network import SOCKETS, Network
from .plane import DataPlane
from .settings import PeerPort
from .spans import Chunk, spans_of

__all__ = ["LeaseEnd", "OfferDesk"]


class LeaseEnd(NamedTuple):
    """What became of one lease, reported once."""

    lease: str
    request_id: str
    error: str | None
    """None when the decode rank said that it has every byte. It may lose the link before it hears our confirmation, and
    fails its fetch then: whether a request has its blocks, its `FetchResult` says."""


@dataclass(eq=False)
class _Lease:
    offer: Offer
    peer: PeerPort
    event: CpuEvent
    last_sign: float
    num_held: int = 0
    """Leading blocks that nothing overwrites until the lease ends."""


@dataclass(eq=False)
class _Peer:
    link: ControlLink | None = None
    unsent: list[Message] = field(default_factory=list)
    """Until the link is there."""


class OfferDesk:
    """Owned by the loop that owns the slot table: only its thread calls anything here, and nothing blocks but `close`.

    `clock` is `time.monotonic` and `network` is `SOCKETS` outside of tests.
    """

    def __init__(
        self,
        ours: Self,
        plane: DataPlane,
        hazards: HazardTable,
        *,
        regions: Sequence[BlockRows] = (),
        network: Network = SOCKETS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`regions`: this rank's tensors, for decode ranks that ask for a digest."""
        self._ours = ours
        self._plane = plane
        self._hazards = hazards
        self._regions = regions
        self._network = network
        self._clock = clock
        self._inbox: Inbox = Inbox()
        self._failed: list[tuple[PeerPort, _Peer, str]] = []  # appended by connecting threads
        self._peers: dict[PeerPort, _Peer] = {}
        self._leases: dict[str, _Lease] = {}
        self._ends: list[LeaseEnd] = []
        self._connecting: list[threading.Thread] = []
        self._opened: dict[ControlLink, tuple[PeerPort, _Peer]] = {}
        self._is_closed = False

    def __len__(self) -> int:
        """Open leases."""
        return len(self._leases)

    def open(self, lease: str, request_id: str, slots: Sequence[int], num_tokens: int, peer: PeerPort) -> None:
        """Offer these device slots to `peer`; connects where needed. The passes that compute the request may still
        write them: `progress` says what is complete.

        Raises `CacheStateError`, nothing offered, for a lease that is open already, a name of more than 128 characters
        (512 of a request), and after `close`.
        """
        if lease in self._leases:
            raise CacheStateError(f"lease {lease!r} is open already")
        if self._is_closed:
            raise CacheStateError("the offer desk is closed")
        offer = Offer(lease, request_id, list(slots), num_tokens)
        require_sendable(offer)
        self._plane.grant(lease, slots)
        self._leases[lease] = _Lease(offer, peer, CpuEvent(), self._clock())
        self._send(peer, offer)

    def progress(self, lease: str, end_block: int, end_layer: int) -> None:
        """Blocks before `end_block` have their KV in layers before `end_layer`, earlier chunks in all layers. A new
        chunk follows a complete one. Nothing overwrites a block that is complete in all layers until the lease ends.
        Does nothing for a lease that has ended.
        """
        held = self._leases.get(lease)
        if held is None:
            return
        if end_layer == self._ours.geometry.num_layers and end_block > held.num_held:
            self._hazards.after(Actor.REMOTE, held.event, reads=held.offer.slots[held.num_held : end_block])
            held.num_held = end_block
        self._send(held.peer, Progress(lease, end_block, end_layer))

    def withdraw(self, lease: str, reason: str) -> None:
        """End a lease. Does nothing for one that has ended."""
        if lease in self._leases:
            self._send(self._leases[lease].peer, Withdraw(lease, reason[:2000]))
            self._end(lease, reason)

    def turn(self) -> list[LeaseEnd]:
        """Act on what has arrived and on deadlines. Returns the leases that ended since the last turn."""
        while not self._inbox.empty():
            self._handle(*self._inbox.get())
        while self._failed:
            self._lose(*self._failed.pop())
        limit = self._clock() - self._ours.settings.lease_s
        for lease in [name for name, each in self._leases.items() if each.last_sign < limit]:
            self.withdraw(lease, f"the decode server did not request it for {self._ours.settings.lease_s:g} s")
        self._connecting = [thread for thread in self._connecting if thread.is_alive()]
        ends, self._ends = self._ends, []
        return ends

    def close(self, reason: str = "the prefill server is stopping") -> None:
        """Withdraw every lease and close every link; `turn` reports the ends. Idempotent."""
        for lease in list(self._leases):
            self.withdraw(lease, reason)
        self._is_closed = True
        for thread in self._connecting:
            thread.join()
        for link in list(self._opened):
            link.close(reason)
        while not self._inbox.empty():
            self._handle(*self._inbox.get())

    def check(self) -> None:
        """Raises `InvariantError`."""
        # Each open lease holds its slots, and has a peer that it was offered to or will be.
        for name, lease in self._leases.items():
            if lease.event.done():
                raise InvariantError(f"lease {name!r} is open and does not hold its slots")
            if lease.peer not in self._peers:
                raise InvariantError(f"lease {name!r} is open for a peer that is gone: {lease.peer}")

    def check_idle(self) -> None:
        """Raises `InvariantError` unless every lease has ended."""
        self.check()
        if self._leases:
            raise InvariantError(f"leases are open: {sorted(self._leases)}")

    # ---- peers

    def _send(self, where: PeerPort, message: Message) -> None:
        peer = self._peers.get(where)
        if peer is None:
            peer = self._peers[where] = _Peer()
            thread = self._network.thread(
                target=self._connect, args=(where, peer), name="kv-transfer-hello", daemon=True
            )
            self._connecting.append(thread)
            thread.start()
        if peer.link is None:
            peer.unsent.append(message)
        else:
            peer.link.send(message)

    def _connect(self, where: PeerPort, peer: _Peer) -> None:
        """On a thread of its own: touches nothing but the two queues."""
        try:
            link = self._network.greet(*where, self._ours, self._inbox)
        except (KVCacheError, OSError) as error:
            self._failed.append((where, peer, f"no link to {where.host}:{where.port}: {error}"))
            return
        self._opened[link] = (where, peer)
        link.start()

    def _lose(self, where: PeerPort, peer: _Peer, reason: str) -> None:
        if self._peers.get(where) is peer:
            del self._peers[where]
            for lease in [name for name, each in self._leases.items() if each.peer == where]:
                self._end(lease, reason)

    def _handle(self, link: ControlLink, message: Message | LinkOpened | LinkClosed) -> None:
        where, peer = self._opened[link]
        now = self._clock()
        if isinstance(message, LinkOpened):
            peer.link = link
            for each in peer.unsent:
                link.send(each)
            peer.unsent.clear()
        elif isinstance(message, LinkClosed):
            link.close(message.reason)
            del self._opened[link]
            self._lose(where, peer, message.reason)
        elif isinstance(message, Ping):
            for name in message.leases:
                if name in self._leases and self._leases[name].peer == where:
                    self._leases[name].last_sign = now
        elif isinstance(message, Done):
            self._settle(link, where, message)
        else:
            link.close(f"{link.peer} sent a {type(message).__name__}, which decode servers do not send")

    # ---- leases

    def _settle(self, link: ControlLink, where: PeerPort, done: Done) -> None:
        lease = self._leases.get(done.lease)
        if lease is None or lease.peer != where:
            if done.error is None:
                link.send(Settled(done.lease, "the lease had ended"))
            return
        error = done.error or self._difference(link, lease.offer, done)
        if done.error is None:
            link.send(Settled(done.lease, error))
        self._end(done.lease, error)

    def _difference(self, link: ControlLink, offer: Offer, done: Done) -> str | None:
        if done.digest is None:
            return None
        slots = offer.slots[done.first_block : done.first_block + done.num_blocks]
        if len(slots) != done.num_blocks or not self._regions:
            return "the digest cannot be checked here"
        ours = self._ours.geometry
        chunk = Chunk(0, len(slots), 0, ours.num_layers)
        spans = spans_of(ours, link.geometry, slots, range(len(slots)), chunk)
        if source_digest(self._regions, spans) != done.digest:
            return "checksum mismatch: bytes changed on the way, or blocks changed under the lease"
        return None

    def _end(self, name: str, error: str | None) -> None:
        lease = self._leases.pop(name)
        self._plane.revoke(name)
        # A read that failed has failed for its reader; the slots that were read are as good as before.
        lease.event.finish()
        self._ends.append(LeaseEnd(name, lease.offer.request_id, error))
