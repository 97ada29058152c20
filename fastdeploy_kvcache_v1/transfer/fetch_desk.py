"""FetchDesk: the decode rank's fetches. Each fills its slots or fails as a whole, and always ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue

from ..errors import CacheStateError, InvariantError, RemoteReadError
from ..worker.hazards import Actor, HazardTable
from ..worker.ops.rows import BlockRows
from .block_reader import BlockReader, ReadEnd, ReadJob
from .control_link import ControlLink, Inbox, LinkClosed, LinkOpened, Self
from .digest import target_digest
from .fetch import Fetch, FetchResult, Part
from .geometry import source_ranks
from .messages import Done, Message, Offer, Ping, Progress, Settled, Withdraw
from .network import SOCKETS, Network
from .plane import DataPlane
from .spans import Chunk, spans_of

__all__ = ["MAX_OFFERS", "FetchDesk"]

MAX_OFFERS = 4096
"""Open at a time."""


class FetchDesk:
    """Owned by the loop that owns the slot table: only its thread calls anything here. `cancel`, `close` and a `turn`
    that ends a fetch wait until its reads have stopped; nothing else blocks.

    With `regions` (this rank's tensors, CPU only) every fetch ends with a digest that both sides make from their own
    memory. `clock` is `time.monotonic` and `network` is `SOCKETS` outside of tests.
    """

    def __init__(
        self,
        ours: Self,
        plane: DataPlane,
        hazards: HazardTable,
        host: str,
        port: int = 0,
        *,
        regions: Sequence[BlockRows] = (),
        names_come_once: bool = False,
        network: Network = SOCKETS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Listens for prefill ranks. Raises `ConfigError` when it cannot.

        `names_come_once`: no request id is used again, so an offer for one whose fetch has failed or was cancelled is
        refused at once. Else it stays until its lease ends: another fetch may want it.
        """
        self._ours = ours
        self._plane = plane
        self._hazards = hazards
        self._regions = regions
        self._network = network
        self._clock = clock
        self._inbox: Inbox = Inbox()
        self._read_ends: SimpleQueue[tuple[ControlLink, ReadEnd]] = SimpleQueue()
        self._readers: dict[ControlLink, BlockReader] = {}
        self._parts: dict[tuple[ControlLink, str], Part] = {}
        """Open offers by link and lease."""
        self._by_request: dict[str, list[Part]] = {}
        """The same offers by request, one of each prefill rank."""
        self._held: set[int] = set()
        """Slots of open fetches."""
        self._fetches: dict[str, Fetch] = {}
        self._results: list[FetchResult] = []
        self._names_come_once = names_come_once
        self._unwanted: dict[str, str] = {}
        """Why, by request: the last `MAX_OFFERS` that ended without their blocks."""
        self.num_refused_offers = 0
        self._server = network.listen(host, port, ours, self._inbox)

    @property
    def port(self) -> int:
        """Where prefill ranks connect to."""
        return self._server.port

    @property
    def num_links(self) -> int:
        return len(self._readers)

    @property
    def num_offers(self) -> int:
        """Open, fetched or not."""
        return len(self._parts)

    def __len__(self) -> int:
        """Open fetches."""
        return len(self._fetches)

    def fetch(self, request_id: str, slots: Sequence[int], *, first_block: int = 0, after_step: int = -1) -> None:
        """Fill device `slots` with the request's blocks from `first_block` on, as soon as they are offered, the worker
        has begun swap step `after_step`, and the uses of the slots by then have ended. Later uses wait for the fetch.

        Raises `CacheStateError`, nothing started, for a request or a slot that an open fetch has.
        """
        if request_id in self._fetches:
            raise CacheStateError(f"request {request_id!r} is being fetched already")
        taken = self._held.intersection(slots)
        if taken or len(set(slots)) != len(slots):
            raise CacheStateError(f"slots {sorted(taken) or list(slots)} would be filled twice")
        now = self._clock()
        self._held.update(slots)
        self._fetches[request_id] = Fetch(request_id, tuple(slots), first_block, after_step, now, now)

    def cancel(self, request_id: str, reason: str = "it was cancelled") -> None:
        """The request is not wanted any more. When this returns, no byte of its fetch can arrive, and its slots may be
        given out again; the result follows. Without a fetch, what was offered is refused.
        """
        self._forget_request(request_id, reason)
        if request_id in self._fetches:
            self._fail(self._fetches[request_id], reason)
        for part in list(self._parts_of(request_id)):
            part.link.send(Done(part.offer.lease, reason[:2000]))
            self._forget(part)

    def turn(self, step: int) -> list[FetchResult]:
        """Act on what has arrived and on deadlines; the worker has begun swap step `step`. Returns what ended since the
        last turn.
        """
        while not self._inbox.empty():
            self._handle(*self._inbox.get())
        while not self._read_ends.empty():
            self._on_read(*self._read_ends.get())
        limit = self._clock() - self._ours.settings.wait_s
        for fetch in list(self._fetches.values()):
            if fetch.last_news < limit:
                wait_s = self._ours.settings.wait_s
                self._fail(fetch, f"no progress of its blocks for {wait_s:g} s")
                continue
            if not fetch.may_write and fetch.after_step <= step:
                self._take_slots(fetch)
            self._go_on(fetch)
        self._tell_wanted()
        results, self._results = self._results, []
        return results

    def close(self, reason: str = "the decode server is stopping") -> None:
        """Fail every fetch and close every link; `turn` reports the ends. Idempotent."""
        self._server.close()
        for request_id in list(self._fetches):
            self.cancel(request_id, reason)
        while not self._inbox.empty():
            self._handle(*self._inbox.get())
        for link in list(self._readers):
            self._close_link(link, reason)

    def check(self) -> None:
        """Raises `InvariantError`."""
        # Open fetches hold their slots, each alone.
        slots = [slot for fetch in self._fetches.values() for slot in fetch.slots]
        if len(slots) != len(self._held) or set(slots) != self._held:
            raise InvariantError(f"fetches hold {sorted(slots)}, the desk counts {sorted(self._held)}")
        if over := [name for name, fetch in self._fetches.items() if fetch.event.done()]:
            raise InvariantError(f"fetches are open and do not hold their slots: {over}")
        # An offer is as good as its link.
        if gone := [lease for link, lease in self._parts if link not in self._readers]:
            raise InvariantError(f"offers of links that are gone: {gone}")
        # The two tables of offers are one, and a request has one offer of each rank.
        for name, parts in self._by_request.items():
            ranks = [part.link.geometry.tp_rank for part in parts]
            if not ranks or len(set(ranks)) != len(ranks):
                raise InvariantError(f"request {name!r} has offers of the ranks {ranks}")
        if sum(map(len, self._by_request.values())) != len(self._parts):
            raise InvariantError(f"{self._by_request} are not the {len(self._parts)} open offers")

    def check_idle(self) -> None:
        """Raises `InvariantError` unless every fetch has ended and no offer is open."""
        self.check()
        if self._fetches or self._parts:
            raise InvariantError(f"{sorted(self._fetches)} are being fetched, {len(self._parts)} offers are open")

    # ---- what arrives

    def _handle(self, link: ControlLink, message: Message | LinkOpened | LinkClosed) -> None:
        if isinstance(message, LinkOpened):
            on_end = partial(self._has_read, link)
            self._readers[link] = self._network.reader(self._plane, link.address, self._ours.settings, on_end)
        elif link not in self._readers:
            pass  # on its way when the link was closed here
        elif isinstance(message, LinkClosed):
            self._close_link(link, message.reason)
        elif isinstance(message, Offer):
            self._on_offer(link, message)
        elif isinstance(message, Progress | Withdraw | Settled):
            part = self._parts.get((link, message.lease))
            if part is not None:  # else it crossed our Done on the way
                self._on_news(part, message)
        elif not isinstance(message, Ping):
            self._close_link(link, f"{link.peer} sent a {type(message).__name__}, which prefill servers do not send")

    def _on_offer(self, link: ControlLink, offer: Offer) -> None:
        if (link, offer.lease) in self._parts:
            self._close_link(link, f"{link.peer} offered lease {offer.lease!r} twice")
            return
        rank = link.geometry.tp_rank
        if rank not in source_ranks(self._ours.geometry, link.geometry.tp_size):
            link.send(Done(offer.lease))  # all that we read of it, which is nothing
            return
        error = None
        if any(part.link.geometry.tp_rank == rank for part in self._parts_of(offer.request_id)):
            error = f"request {offer.request_id!r} is offered already by rank {rank}"
        elif len(self._parts) >= MAX_OFFERS:
            error = f"{MAX_OFFERS} offers are open already"
        elif offer.request_id in self._unwanted:
            error = self._unwanted[offer.request_id]
        if error is not None:
            self.num_refused_offers += 1
            link.send(Done(offer.lease, error))
            return
        part = self._parts[link, offer.lease] = Part(link, offer, self._ours.geometry.num_layers)
        self._by_request.setdefault(offer.request_id, []).append(part)
        self._note(offer.request_id)

    def _on_news(self, part: Part, message: Progress | Withdraw | Settled) -> None:
        fetch = self._fetch_of(part)
        try:
            if isinstance(message, Progress):
                part.advance(message.end_block, message.end_layer)
            elif isinstance(message, Withdraw):
                raise RemoteReadError(f"the prefill server withdrew its blocks: {message.reason}")
            elif message.error is not None or not part.is_done:
                raise RemoteReadError(f"the prefill server does not confirm its blocks: {message.error}")
            else:
                part.is_settled = True
            self._note(part.offer.request_id)
        except RemoteReadError as error:
            if fetch is not None:
                self._fail(fetch, str(error))
            elif (part.link, part.offer.lease) in self._parts:
                self._forget(part)
                part.link.send(Done(part.offer.lease, str(error)[:2000]))

    def _has_read(self, link: ControlLink, end: ReadEnd) -> None:
        """On the reader's thread."""
        self._read_ends.put((link, end))

    def _on_read(self, link: ControlLink, end: ReadEnd) -> None:
        part = self._parts.get((link, end.job.lease))
        fetch = None if part is None else self._fetch_of(part)
        if part is None or fetch is None:
            return  # ended meanwhile
        if end.error is not None:
            self._fail(fetch, end.error)
            return
        part.num_open_reads -= 1
        fetch.num_bytes += end.job.spans.num_bytes
        fetch.last_news = self._clock()

    def _close_link(self, link: ControlLink, reason: str) -> None:
        for part in [part for (where, _), part in self._parts.items() if where is link]:
            fetch = self._fetch_of(part)
            if fetch is not None:
                self._fail(fetch, reason)
            self._forget(part)
        self._readers.pop(link).close()
        link.close(reason)

    # ---- fetches

    def _tell_wanted(self) -> None:
        wanted: dict[ControlLink, list[str]] = {link: [] for link in self._readers}
        for name in self._fetches:
            for part in self._parts_of(name):
                wanted[part.link].append(part.offer.lease)
        for link, leases in wanted.items():
            link.want(tuple(leases))

    def _take_slots(self, fetch: Fetch) -> None:
        """Told only when the earlier uses have ended: a fetch that fails before must not hide those that run."""
        if not self._hazards.before(Actor.REMOTE, writes=fetch.slots):
            self._hazards.after(Actor.REMOTE, fetch.event, writes=fetch.slots)
            fetch.may_write = True

    def _go_on(self, fetch: Fetch) -> None:
        parts = self._parts_of(fetch.request_id)
        if not parts or not fetch.may_write:
            return
        fetch.ranks = source_ranks(self._ours.geometry, parts[0].link.geometry.tp_size)
        if any(len(part.offer.slots) < fetch.end_block for part in parts):
            self._fail(fetch, f"{fetch.end_block} blocks are wanted, {len(parts[0].offer.slots)} are offered")
            return
        for part in parts:
            self._ask(fetch, part)
            if not part.is_done and not part.num_open_reads and part.has_told(fetch.end_block):
                part.is_done = True
                part.link.send(self._done(fetch, part))
        if sorted(part.link.geometry.tp_rank for part in parts if part.is_settled) == fetch.ranks:
            self._end(fetch)

    def _ask(self, fetch: Fetch, part: Part) -> None:
        for told in part.told:
            chunk = fetch.part_of(told)
            if chunk is not None:
                sources = part.offer.slots[fetch.first_block : fetch.end_block]
                spans = spans_of(part.link.geometry, self._ours.geometry, sources, fetch.slots, chunk)
                self._readers[part.link].submit(ReadJob(part.offer.lease, spans))
                part.num_open_reads += 1
        part.told.clear()

    def _done(self, fetch: Fetch, part: Part) -> Done:
        digest = None
        if self._regions:
            ours = self._ours.geometry
            whole = Chunk(0, len(fetch.slots), 0, ours.num_layers)
            spans = spans_of(part.link.geometry, ours, range(len(fetch.slots)), fetch.slots, whole)
            digest = target_digest(self._regions, spans)
        return Done(part.offer.lease, None, fetch.first_block, len(fetch.slots), digest)

    def _forget_request(self, request_id: str, reason: str) -> None:
        if self._names_come_once:
            self._unwanted[request_id] = reason[:2000]
            if len(self._unwanted) > MAX_OFFERS:
                del self._unwanted[next(iter(self._unwanted))]

    def _fail(self, fetch: Fetch, reason: str) -> None:
        """No byte can arrive any more when this returns."""
        self._forget_request(fetch.request_id, reason)
        for part in self._parts_of(fetch.request_id):
            self._readers[part.link].cancel(part.offer.lease)
            if not part.is_settled:
                part.link.send(Done(part.offer.lease, reason[:2000]))
        self._end(fetch, reason)

    def _end(self, fetch: Fetch, error: str | None = None) -> None:
        for part in list(self._parts_of(fetch.request_id)):
            self._forget(part)
        self._held.difference_update(fetch.slots)
        del self._fetches[fetch.request_id]
        fetch.event.finish(None if error is None else RemoteReadError(error))
        seconds = self._clock() - fetch.begun_at
        failed = () if error is None else fetch.slots
        self._results.append(FetchResult(fetch.request_id, fetch.num_bytes, seconds, failed, error))

    def _forget(self, part: Part) -> None:
        """Idempotent."""
        if self._parts.pop((part.link, part.offer.lease), None) is not None:
            parts = self._by_request[part.offer.request_id]
            parts.remove(part)
            if not parts:
                del self._by_request[part.offer.request_id]

    def _parts_of(self, request_id: str) -> list[Part]:
        return self._by_request.get(request_id, [])

    def _fetch_of(self, part: Part) -> Fetch | None:
        return self._fetches.get(part.offer.request_id)

    def _note(self, request_id: str) -> None:
        if request_id in self._fetches:
            self._fetches[request_id].last_news = self._clock()
