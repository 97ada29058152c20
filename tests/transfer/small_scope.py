"""Servers of a few ranks with every event that can happen to them next, and a search over all orders of events.

Real are the ledgers of both engines, the desks, what stands between them, and the messages; connections and reads are
those of `MemoryNetwork`. A slot that is given back is overwritten at once, so that any use of it afterwards is seen.
"""

from __future__ import annotations

import hashlib
import pickle
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from fastdeploy_kvcache_v1.attention.base import CacheLayout, RoleSpec
from fastdeploy_kvcache_v1.transfer.control_link import Self
from fastdeploy_kvcache_v1.transfer.geometry import Geometry
from fastdeploy_kvcache_v1.transfer.ledger import FetchLedger, FetchOutcome, LeaseLedger
from fastdeploy_kvcache_v1.transfer.rank_messages import CancelFetch, OpenLease, StartFetch, WithdrawLease
from fastdeploy_kvcache_v1.transfer.rank_transfers import RankTransfers
from fastdeploy_kvcache_v1.transfer.settings import PeerPort, TransferSettings
from fastdeploy_kvcache_v1.worker.hazards import Actor, HazardTable
from tests.transfer.network import MemoryNetwork, Move

HEADS, BLOCKS = 2, 2
PREFILL_SLOTS, DECODE_SLOTS = 4, 2
FREE = {"prefill": 0xF0, "decode": 0xF1}
"""What a slot holds that nobody owns."""
ENDLESS = 40
"""Turns of a world in which nothing new begins; it needs five."""


class Scope(NamedTuple):
    requests: str = "a"
    prefills: int = 1
    decodes: int = 1
    faults: int = 0
    looks_at_leases: bool = True
    begun: int = 0
    """Events of a transfer that goes well before the search begins."""


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Rank:
    """A rank of one server: what its engine said and it has not obeyed yet, its tensor, its desks."""

    def __init__(self, net, clock, kind, number, size, scope):
        heads = max(1, HEADS // size)
        layout = CacheLayout(1, (RoleSpec("key", (heads, 1), "uint8"),))
        geometry = Geometry.of(layout, model="m", block_size=1, tp_size=size, tp_rank=number, num_kv_heads=HEADS)
        self.kind, self.heads = kind, geometry.heads
        self.num_slots = PREFILL_SLOTS if kind == "prefill" else DECODE_SLOTS
        self.tensor = np.full((self.num_slots, heads), FREE[kind], np.uint8)
        self.name = f"{kind} {number}"
        plane = net.plane(self.name, [self.tensor], looks_at_leases=scope.looks_at_leases)
        self.hazards = HazardTable("device", self.num_slots)
        settings = TransferSettings(secret=b"sixteen bytes or more", instance=self.name)
        listen = PeerPort("here", 0) if kind == "decode" else None
        self.commands = deque()
        self.desks = RankTransfers(
            Self(geometry, plane.address(), settings),
            plane,
            self.hazards,
            listen=listen,
            names_come_once=True,
            network=net.ends(),
            clock=clock,
        )

    def obey(self):
        command = self.commands.popleft()
        if isinstance(command, tuple) and command[0] == "compute":
            _, request, end = command
            self.desks.begin_pass([(request, end)])
            self.desks.end_pass([request])
        else:
            self.desks.handle([command])

    def holds(self, request, block):
        """The bytes of a block of a request on this rank."""
        return [16 * (1 + ord(request) - ord("a")) + 4 * block + head for head in self.heads]


class Server:
    """An engine and its ranks."""

    def __init__(self, kind, ranks, ledger):
        self.kind, self.ranks, self.ledger = kind, ranks, ledger
        self.free = list(range(ranks[0].num_slots))
        self.slots = {}
        """Of requests that have some."""
        self.past = set()
        """Requests that had some, or are not wanted any more."""

    def take(self, request):
        self.slots[request] = [self.free.pop(0) for _ in range(BLOCKS)]

    def tell(self, command):
        for rank in self.ranks:
            rank.commands.append(command)

    def give_back(self, request):
        slots = self.slots.pop(request)
        self.past.add(request)
        for rank in self.ranks:
            assert not rank.hazards.before(Actor.COMPUTE, writes=slots), f"{rank.name}: {request}'s slots are in use"
            rank.tensor[slots] = FREE[self.kind]
        self.free = sorted([*self.free, *slots])


class World:
    def __init__(self, scope):
        self.scope = scope
        self.net, self.clock = MemoryNetwork(), Clock()
        self.faults_left = scope.faults
        self.faulty = False
        decodes = [Rank(self.net, self.clock, "decode", each, scope.decodes, scope) for each in range(scope.decodes)]
        prefills = [
            Rank(self.net, self.clock, "prefill", each, scope.prefills, scope) for each in range(scope.prefills)
        ]
        self.ports = tuple(PeerPort("here", rank.desks.port) for rank in decodes)
        self.prefill = Server("prefill", prefills, LeaseLedger(num_ranks=scope.prefills))
        self.decode = Server("decode", decodes, FetchLedger(num_ranks=scope.decodes, clock=self.clock))
        self.computed = {}
        self.withdrawn = set()
        for _ in range(scope.begun):
            self._go_on_well()

    def _go_on_well(self):
        wanted = [move for name, move in self.moves() if not name.startswith(("withdraw", "cancel", "!"))]
        wanted[0]()
        self.settle_accounts()

    # ---- what can happen next

    def moves(self) -> list[Move]:
        found = self.net.moves()
        for rank in self._ranks():
            if rank.commands:
                found.append((f"{rank.name} obeys", rank.obey))
        for request in self.scope.requests:
            for kind, able in (
                ("open", self._can_open),
                ("compute", self._can_compute),
                ("withdraw", self._can_withdraw),
                ("fetch", self._can_fetch),
                ("cancel", self._can_cancel),
            ):
                if able(request):
                    found.append((f"{kind} {request}", partial(getattr(self, f"_{kind}"), request)))
        if self.faults_left:
            found += [(f"! {name}", partial(self._fault, move)) for name, move in self._faults()]
        return found

    def _faults(self) -> list[Move]:
        found = [*self.net.faults(), ("nobody is heard for a minute", self._pass_time)]
        for server in (self.prefill, self.decode):
            if server.ranks:
                found.append((f"{server.kind} dies", partial(self._die, server)))
        return found

    def _fault(self, move):
        self.faulty = True
        self.faults_left -= 1
        move()

    def _pass_time(self):
        self.clock.now += 61.0

    def _die(self, server):
        for end in self.net.links:
            if end.instance not in [rank.name for rank in server.ranks]:
                end.close("the process ended")
        self.net.starting = [] if server is self.prefill else self.net.starting
        for rank in server.ranks:
            self.net.planes[rank.name].is_dead = True
        if server is self.decode:
            self.net.listeners.clear()
            self.net.readers.clear()
        server.ranks, server.slots = [], {}
        server.past.update(self.scope.requests)

    def _can_open(self, request):
        return self.prefill.ranks and request not in self.prefill.past | self.prefill.slots.keys()

    def _open(self, request):
        self.prefill.take(request)
        self.computed[request] = 0
        command = OpenLease(request, request, tuple(self.prefill.slots[request]), BLOCKS, self.ports)
        self.prefill.ledger.open(request)
        self.prefill.tell(command)

    def _can_compute(self, request):
        return request in self.prefill.slots and self.computed[request] < BLOCKS

    def _compute(self, request):
        block = self.computed[request]
        for rank in self.prefill.ranks:
            rank.tensor[self.prefill.slots[request][block]] = rank.holds(request, block)
        self.computed[request] += 1
        self.prefill.tell(("compute", request, block + 1))

    def _can_withdraw(self, request):
        lease = self.prefill.ledger._leases.get(request)
        return lease is not None and not lease.is_withdrawn

    def _withdraw(self, request):
        self.withdrawn.add(request)
        assert self.prefill.ledger.withdraw(request)
        self.prefill.tell(WithdrawLease(request, "aborted"))

    def _can_fetch(self, request):
        server = self.decode
        return server.ranks and request not in server.past | server.slots.keys() and len(server.free) >= BLOCKS

    def _fetch(self, request):
        self.decode.take(request)
        assert self.decode.ledger.grant(request, 600.0)
        self.decode.ledger.start(request)
        self.decode.tell(StartFetch(request, tuple(self.decode.slots[request]), 0))

    def _can_cancel(self, request):
        return self.decode.ranks and request not in self.decode.past

    def _cancel(self, request):
        self.decode.past.add(request)
        self.decode.ledger.cancel(request, "the client left")
        if request not in self.decode.slots:
            self.decode.tell(CancelFetch(request, "the client left"))

    # ---- laws, after each event

    def settle_accounts(self):
        """Every rank takes a turn; engines hear what ended; what must hold, holds."""
        self._look_at_reads()
        for rank in self._ranks():
            rank.desks.turn()
            rank.desks.check()
        for number, rank in enumerate(self.prefill.ranks):
            for end in rank.desks.take_news().leases:
                if self.prefill.ledger.report(end, number):
                    self._lease_is_over(end.request_id)
        for number, rank in enumerate(self.decode.ranks):
            for result in rank.desks.take_news().fetches:
                if end := self.decode.ledger.report(result, number):
                    self._fetch_is_over(end)
        for request, reason in self.decode.ledger.take_cancels().items():
            self.decode.tell(CancelFetch(request, reason))
        self.decode.ledger.check()
        self._look_at_slots()

    def _lease_is_over(self, request):
        slots = set(self.prefill.slots[request])
        if not self.faulty and request not in self.withdrawn | self.decode.past:
            for reader in self.net.readers:
                if reader.source in [self.net.planes[rank.name] for rank in self.prefill.ranks]:
                    width = reader.source.tensors[0].shape[1]
                    read = {span.source_offset // width for job in reader.jobs for span in job.spans}
                    assert not slots & read, f"{request}'s slots are given back while a peer reads them"
        self.prefill.give_back(request)

    def _fetch_is_over(self, end):
        slots = self.decode.slots[end.request_id]
        given_up = self.faulty or end.request_id in self.decode.past or end.request_id in self.withdrawn
        assert end.outcome is FetchOutcome.ARRIVED or given_up, f"{end.request_id} {end.outcome}: {end.reason}"
        if end.outcome is FetchOutcome.ARRIVED:
            for rank in self.decode.ranks:
                for block, slot in enumerate(slots):
                    got = rank.tensor[slot].tolist()
                    assert got == rank.holds(end.request_id, block), f"{rank.name} commits {got} as {end.request_id}"
        self.decode.give_back(end.request_id)

    def _look_at_reads(self):
        """No slot is read after its lease ended, on planes where the peer looks."""
        reads, self.net.reads = self.net.reads, []
        self.net.sent.clear()
        if self.scope.looks_at_leases:
            owned = {slot for slots in self.prefill.slots.values() for slot in slots}
            for plane, lease, slots in reads:
                assert not self.prefill.ranks or owned.issuperset(slots), f"slots {slots} of {plane} are read: {lease}"

    def _look_at_slots(self):
        """Bytes land in slots of their own request and in no others."""
        owner = {
            slot: (request, block) for request, all_ in self.decode.slots.items() for block, slot in enumerate(all_)
        }
        for rank in self.decode.ranks:
            for slot, held in enumerate(rank.tensor.tolist()):
                allowed = [{FREE["decode"]} for _ in held]
                if slot in owner:
                    allowed = [{FREE["decode"], byte} for byte in rank.holds(*owner[slot])]
                    if not self.scope.looks_at_leases:
                        continue  # what is read after the lease ended fails with its fetch
                assert all(byte in may for byte, may in zip(held, allowed, strict=True)), f"{rank.name} {slot}: {held}"

    # ---- the end

    def finish(self):
        """Only what has begun goes on: everything ends, by an event unless there was a fault."""
        self.faults_left = 0
        self._run()
        if not self.faulty:
            left = [name for name, lease in self.prefill.ledger._leases.items() if lease.is_withdrawn]
            assert not left, f"{left} are withdrawn, and only a decode server could end them"
        for ask in ("_compute", "_fetch", "_cancel"):
            for _ in range(BLOCKS):
                self._run()
                for request in self.scope.requests:
                    begun = request in self.prefill.slots or request in self.decode.slots
                    if (begun or self.faulty) and getattr(self, f"_can{ask}")(request):
                        getattr(self, ask)(request)
        self._run()
        for _ in range(6 if self.faulty else 0):
            self.net.ping()
            self.clock.now += 31.0
            self._run()
        for rank in self._ranks():
            rank.desks.check_idle()
            assert not rank.desks.is_busy
        for server in (self.prefill, self.decode):
            if server.ranks:
                server.ledger.check_idle()
                assert not server.slots

    def _run(self):
        for _ in range(ENDLESS):
            moved = self.net.settle()
            for rank in self._ranks():
                moved |= bool(rank.commands)
                while rank.commands:
                    rank.obey()
            self.settle_accounts()
            if not moved and not self.net.moves() and not any(rank.commands for rank in self._ranks()):
                return
        raise AssertionError("it never comes to rest")

    def _ranks(self) -> Iterator[Rank]:
        yield from self.prefill.ranks
        yield from self.decode.ranks


class Found(NamedTuple):
    states: int
    events: int
    is_whole: bool
    """Every state that there is was seen."""


def search(scope: Scope, *, most_states: int) -> Found:
    """Breadth first over the states of a world. Raises `AssertionError` with the events that led to a broken law."""
    start = pickle.dumps(World(scope))
    seen = {hashlib.sha1(start).digest()}
    waiting: deque[tuple[bytes, tuple[str, ...]]] = deque([(start, ())])
    events = 0
    while waiting:
        if len(seen) > most_states:
            return Found(len(seen), events, False)
        state, path = waiting.popleft()
        names = [name for name, _ in pickle.loads(state).moves()]
        for number, name in enumerate(names):
            world = pickle.loads(state)
            events += 1
            try:
                world.moves()[number][1]()
                world.settle_accounts()
                after = pickle.dumps(world)
                digest = hashlib.sha1(after).digest()
                if digest not in seen:
                    world.finish()
            except Exception as error:
                raise AssertionError(f"{error!r} after: {', '.join([*path, name])}") from error
            if digest not in seen:
                seen.add(digest)
                waiting.append((after, (*path, name)))
    return Found(len(seen), events, True)
