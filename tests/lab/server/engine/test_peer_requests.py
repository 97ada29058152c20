"""Two servers that share requests: the tokens of one, whatever fails between them, and nothing left behind."""

import random
from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.lab.server.engine.generation import Failure, State
from fastdeploy_kvcache_v1.lab.server.engine.offered_prefills import OfferedPrefills
from fastdeploy_kvcache_v1.lab.server.engine.remote_prefills import RemotePrefills
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager
from fastdeploy_kvcache_v1.transfer.settings import TransferSettings
from tests.world.clients import Request
from tests.world.embedded_host import Engine, EngineRank
from tests.world.quiet import UIDS, Quiet
from tests.world.roles import HERE, Roles
from tests.world.streams import VirtualDevice

BLOCK = 4
PROMPT = list(range(100, 118))
"""Four blocks and two tokens."""


class Peers(Quiet):
    """The world's scenario `embedded roles`, whose turns a test takes by hand."""

    def __init__(self, *, decode_blocks=64, budget=32):
        super().__init__(BLOCK)
        asker, self.settings = SimpleNamespace(), TransferSettings(secret=b"sixteen bytes or more")
        self.remote = RemotePrefills(asker, [HERE], self.settings, block_size=BLOCK, vocab_size=1000, clock=self.clock)
        self.offered = OfferedPrefills()
        self.prefill = self._server(64, budget, offered=self.offered)
        self.decode = self._server(decode_blocks, budget, remote=self.remote)
        self.host = Roles(self, self.prefill, self.decode, 1)
        asker.ask, asker.drop = self.host.ask, self.host.drop

    def _server(self, blocks, budget, **role):
        rank = EngineRank(
            VirtualDevice(self.clock, at_once=True), blocks=blocks, host_blocks=0, block_size=BLOCK, tags=self.tags
        )
        manager = CacheManager(KVCacheConfig(blocks, block_size=BLOCK))
        return Engine(self, manager, rank, seats=8, budget=budget, **role)

    def random(self):
        return 0.0

    def submit(self, name="r", prompt=PROMPT):
        """Returns the request, whose tokens are looked at as they come. Decode asks for prompts of other than 5n."""
        request = Request(next(UIDS), name, list(prompt), 4)
        self.clients.requests[request.uid] = request
        self.host.add(request)
        return request

    def start(self, *given):
        """Up to where the decode server fetches and the prefill server has been asked."""
        request = self.submit(*given)
        self.step(self.decode)
        self.host.deliver(self)
        assert list(self.host.fetches) == list(self.host._awaited) == [self.host.name(request)]
        return request

    def prefill_alone(self, name, prompt):
        """What the prefill server says of such a request."""
        events, request = [], Request(next(UIDS), name, list(prompt), 2)
        self.prefill.core.submit(
            self.prefill.generation(name, request, lambda _, event: events.append(event), max_tokens=2)
        )
        return events

    def step(self, server):
        """One batch there and back. False: there is nothing to send."""
        server.step(self)
        is_sent = bool(server._sent)
        for part in (server.take, server.answer):
            part(self)
        self.host.check()
        return is_sent

    def compute(self):
        while self.step(self.prefill):
            pass

    def generation(self):
        """Of the only request at decode."""
        (generation,) = self.decode.core._generations.values()
        return generation

    def settle(self, *requests):
        """Until all have ended, with all their tokens, and nothing is left behind."""
        rng = random.Random(0)
        for _ in range(1000):
            if self.host.is_idle and self.decode.is_idle:
                break
            for event in (self.prefill.turn, self.decode.turn, self.host.between):
                event(rng)
                self.host.check()
        self.host.check_idle()
        assert [len(each.output) for each in requests] == [4] * len(requests)


def test_a_prompt_is_computed_on_one_server_and_continued_on_the_other():
    peers = Peers()
    request = peers.start()
    peers.compute()
    peers.settle(request)
    assert peers.decode.core.counters.computed_tokens == 3, "only what was generated is computed"
    assert peers.prefill.core.counters.computed_tokens == len(PROMPT)
    assert peers.remote.ledger.totals.arrived == peers.offered.ledger.totals.arrived == 1
    # Both have it cached now: the decode server needs nobody for the same prompt.
    peers.settle(peers.submit("again"))
    assert peers.remote.counters.prompts_declined == 1
    assert peers.remote.ledger.totals.started == 1


def test_a_failed_fetch_is_computed_here_in_the_same_slots():
    peers = Peers()
    request = peers.start()
    name, generation = peers.host.name(request), peers.generation()
    table = peers.decode.manager.block_table(name)
    peers.host.scribble(peers)
    peers.host.end_fetch(name, "the link broke")
    peers.decode.tell_news(peers)
    assert generation.state is State.RUNNING
    assert peers.decode.manager.block_table(name) == table
    assert peers.host._dropped == {name}
    peers.settle(request)
    counters = peers.remote.counters
    assert (counters.prompts_recomputed, counters.recomputed_prompt_tokens) == (1, len(PROMPT))
    assert peers.remote.ledger.totals.failed == 1


def test_blocks_without_a_first_token_are_used_after_a_deadline():
    peers = Peers()
    request = peers.start()
    peers.compute()
    peers.host.arrive(peers)
    peers.decode.tell_news(peers)
    assert peers.decode.core.seconds_to_next_deadline() == peers.settings.silence_s
    peers.clock.now += peers.settings.silence_s
    assert peers.step(peers.decode)
    assert len(request.output) == 1
    assert peers.decode.core.counters.computed_tokens == 1, "the last token of the prompt, for its logits"
    peers.settle(request)


def test_a_fetch_that_never_ends_is_given_up():
    peers = Peers()
    request = peers.start()
    peers.clock.now += peers.decode.core.seconds_to_next_deadline()
    assert peers.step(peers.decode)
    assert not peers.host.fetches
    peers.settle(request)
    assert peers.remote.ledger.totals.overdue == 1


def test_slots_of_an_aborted_request_are_kept_until_its_fetch_ends():
    peers = Peers(decode_blocks=6)
    peers.start()
    peers.abort("r")
    other = peers.submit("other", range(500, 515))
    assert peers.step(peers.decode), "the cancel goes to the worker"
    assert not peers.decode.rank.generations, "there is no room for another one yet"
    peers.settle(other)


def test_a_prefill_that_is_dropped_withdraws_its_lease():
    peers = Peers(budget=8)
    name = peers.host.name(peers.start())
    peers.step(peers.prefill)
    assert name in peers.host.leases
    peers.prefill.core.abort(name)
    peers.step(peers.prefill)
    assert not peers.host.leases


def test_fetching_request_without_its_prefix_restarts_after_the_fetch_ends():
    peers = Peers()
    peers.settle(peers.start())
    longer = peers.start("longer", PROMPT[:12] + list(range(300, 310)))
    peers.decode.core.peers.lose(peers.generation())
    assert peers.generation().state is State.FETCHING
    peers.settle(longer)
    assert peers.decode.manager.stats().counters.requests_preempted == 1


def test_a_lease_that_ends_early_fails_the_prefill_and_not_the_request():
    peers = Peers(budget=8)
    request = peers.start()
    name = peers.host.name(request)
    peers.step(peers.prefill)
    assert peers.host._awaited[name] == []
    peers.host.end_lease(name, "no link")
    peers.prefill.tell_news(peers)
    assert peers.host._awaited[name] == [Failure(503, "its blocks cannot be read any more: no link")]
    peers.settle(request)


def test_the_same_job_twice_is_refused_once():
    peers = Peers()
    request = peers.start()
    name = peers.host.name(request)
    assert peers.prefill_alone(name, PROMPT) == [Failure(409, f"request {name} is known already")]
    peers.settle(request)


def test_a_token_outside_the_vocabulary_is_no_answer():
    peers = Peers()
    request = peers.start()
    peers.remote._vocab_size = 1
    peers.compute()
    peers.host.answer(peers)
    assert request.output == []
    peers.settle(request)


@pytest.mark.parametrize("phase", ["first chunk", "last chunk"])
def test_prompt_preempted_while_offered_is_not_offered_from_other_blocks(phase):
    """The lease names the slots of before; a copy that failed has cost the request them."""
    peers = Peers(budget=8)
    request = peers.start()
    for _ in range(1 if phase == "first chunk" else 2):
        peers.step(peers.prefill)
    (generation,) = peers.prefill.scheduler.running
    peers.prefill.scheduler.preempt(generation)
    other = peers.prefill_alone("other", range(700, 730))
    peers.settle(request)
    assert other[-1].finish_reason == "length"
    assert peers.remote.counters.prompts_recomputed == 1
    assert peers.remote.ledger.totals.arrived == 0
