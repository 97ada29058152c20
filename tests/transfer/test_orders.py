"""Desks under any order of events, and whatever becomes of their messages, reads and links; a seed replays a run."""

import random
from functools import partial

import pytest

from tests.gpu.plane_contract import CANARY
from tests.transfer.network import MemoryNetwork
from tests.transfer.ranks import BLOCK, DecodeRank, PrefillRank, geometry
from tests.world.streams import Clock

REQUESTS, BLOCKS = "abc", 3
SOURCE = {request: [7 * number + 1, 7 * number + 2, 7 * number + 5] for number, request in enumerate(REQUESTS)}
TARGET = {request: [60 - 5 * number, 59 - 5 * number, 3 + number] for number, request in enumerate(REQUESTS)}
EVENTS = 200
UNWANTED = "not wanted any more"


class Orders:
    def __init__(self, seed, prefills, decodes, goes_wrong, looks_at_leases=True):
        self.rng, self.net, self.clock, self.goes_wrong = random.Random(seed), MemoryNetwork(), Clock(), goes_wrong
        self.prefills = [
            PrefillRank(self.net, rank_geometry=geometry(prefills, rank), clock=self.clock) for rank in range(prefills)
        ]
        self.decodes = [
            DecodeRank(self.net, rank_geometry=geometry(decodes, rank), clock=self.clock, names_come_once=True)
            for rank in range(decodes)
        ]
        self.computed, self.fetched, self.open = {}, set(), {rank: {} for rank in self.decodes}
        """Blocks by rank and request; requests that a rank has asked for; targets of its open fetches."""
        self.num_arrived, self.faults_left = 0, self.rng.randint(0, 2)
        for rank in self.prefills:
            rank.plane.looks_at_leases = looks_at_leases

    def leases(self, request):
        return [f"{request} {number}" for number in range(len(self.decodes))]

    def offer(self, rank, request):
        self.computed[rank, request] = 0
        for lease, decode in zip(self.leases(request), self.decodes, strict=True):
            rank.offer(lease, SOURCE[request], decode.port, request=request, tokens=BLOCKS * BLOCK)

    def compute(self, rank, request):
        self.computed[rank, request] += 1
        for lease in self.leases(request):
            rank.all_there(lease, self.computed[rank, request])

    def fetch(self, rank, request):
        self.fetched.add((rank, request))
        self.open[rank][request] = TARGET[request]
        rank.desk.fetch(request, TARGET[request])

    def cancel(self, rank, request):
        self.fetched.add((rank, request))
        rank.desk.cancel(request, UNWANTED)

    def withdraw(self, rank, request):
        for lease in self.leases(request):
            rank.desk.withdraw(lease, UNWANTED)

    def wait(self):
        self.clock.advance(31)

    def events(self):
        for request in REQUESTS:
            for rank in self.prefills:
                done = self.computed.get((rank, request))
                if done is None:
                    yield partial(self.offer, rank, request)
                elif done < BLOCKS:
                    yield partial(self.compute, rank, request)
                if self.goes_wrong and done is not None and self.rng.random() < 0.004:
                    yield partial(self.withdraw, rank, request)
            for rank in self.decodes:
                if (rank, request) not in self.fetched:
                    yield partial(self.fetch, rank, request)
                if self.goes_wrong and self.rng.random() < 0.004:
                    yield partial(self.cancel, rank, request)

    def step(self):
        chances = [*self.events(), *(move for _, move in self.net.moves())]
        if self.goes_wrong and self.faults_left and self.rng.random() < 0.05:
            self.faults_left -= 1
            chances = [self.wait, *(fault for _, fault in self.net.faults())]
        if chances:
            self.rng.choice(chances)()
        self.turn(self.rng.choice([*self.prefills, *self.decodes]))

    def turn(self, rank):
        before = len(rank.done)
        rank.turn()
        for end in rank.done[before:]:
            if rank in self.prefills:
                left = [each for each in self.leases(end.request_id) if rank.desk._leases.get(each)]
                if not left:  # the slots are given to others
                    for tensor in rank.tensors:
                        tensor[SOURCE[end.request_id]] = CANARY
                continue
            slots = self.open[rank].pop(end.request_id)
            assert self.goes_wrong or end.error is None
            if end.error is None:
                assert rank.holds(slots, 1, SOURCE[end.request_id])
                self.num_arrived += 1
            for tensor in rank.tensors:
                tensor[slots] = CANARY
        if rank in self.decodes:
            assert rank.touched() <= {slot for slots in self.open[rank].values() for slot in slots}

    def finish(self):
        """What has begun ends: by an event, unless something went wrong."""
        ranks = [*self.prefills, *self.decodes]
        for _ in range(100):
            for event in [*self.events()]:
                event()
            self.net.settle()
            for rank in ranks:
                self.turn(rank)
            self.net.ping()
            self.clock.advance(31 * self.goes_wrong)
        assert not any(self.open.values())
        for rank in ranks:
            assert rank.is_idle()
            rank.close()


@pytest.mark.parametrize(("prefills", "decodes"), [(1, 1), (2, 1), (1, 2), (4, 2)])
@pytest.mark.parametrize("seed", range(8))
def test_every_fetch_ends_with_its_bytes_or_fails_and_touches_nothing_else(seed, prefills, decodes):
    orders = Orders(seed, prefills, decodes, goes_wrong=seed > 0, looks_at_leases=seed % 4 < 3)
    for _ in range(EVENTS):
        orders.step()
    orders.finish()
    assert orders.goes_wrong or orders.num_arrived == len(REQUESTS) * decodes
