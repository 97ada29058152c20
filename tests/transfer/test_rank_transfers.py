"""The worker's glue: a batch of a prefill rank becomes blocks of a decode rank, layer by layer."""

import pytest

from fastdeploy_kvcache_v1.transfer.rank_messages import CancelFetch, OpenLease, StartFetch, WithdrawLease
from fastdeploy_kvcache_v1.transfer.rank_transfers import RankTransfers
from fastdeploy_kvcache_v1.transfer.settings import PeerPort
from fastdeploy_kvcache_v1.worker.hazards import Actor
from tests.transfer.planes import HOST
from tests.transfer.ranks import BLOCK, LAYERS, DecodeRank, PrefillRank, until


class Glued:
    """`RankTransfers` over the tensors of a rank whose own desk is not used."""

    def __init__(self, rank, listen=None):
        self.rank, self.net = rank, rank.net
        rank.desk.close()
        self.glue = RankTransfers(rank.ours, rank.plane, rank.hazards, listen=listen, network=rank.net.ends())
        self.leases, self.fetches = [], []

    def turn(self):
        self.glue.turn()
        self.glue.check()
        news = self.glue.take_news()
        assert bool(news) == bool(news.leases or news.fetches)
        self.leases += news.leases
        self.fetches += news.fetches


@pytest.fixture
def pair(ranks):
    made = Glued(ranks(PrefillRank)), Glued(ranks(DecodeRank), PeerPort(HOST, 0))
    yield made
    for each in made:
        each.glue.close()
        each.glue.check_idle()


def open_lease(prefill, *decodes, slots, tokens, name="r"):
    peers = tuple(PeerPort(HOST, decode.glue.port) for decode in decodes)
    prefill.glue.handle([OpenLease(name, name, tuple(slots), tokens, peers)])


def compute(prefill, end, *, computed=("r",)):
    prefill.glue.begin_pass([("r", end), ("a request without a lease", 7)])
    for layer in range(LAYERS):
        prefill.glue.layer_begins(layer)
    prefill.glue.end_pass(computed)


def is_held(prefill, slots):
    return bool(prefill.rank.hazards.before(Actor.COMPUTE, writes=slots))


def test_chunks_of_a_prompt_arrive_as_they_are_computed(pair):
    prefill, decode = pair
    slots, tokens = [3, 9, 4], 2 * BLOCK + 5
    open_lease(prefill, decode, slots=slots, tokens=tokens)
    decode.glue.handle([StartFetch("r", (20, 21, 22), 0)])
    assert prefill.glue.is_busy
    assert decode.glue.is_busy
    compute(prefill, BLOCK + 3)
    until(lambda: 20 in decode.rank.touched(), prefill, decode)
    assert decode.rank.touched() == {20}, "the second block was not complete"
    assert not decode.fetches
    compute(prefill, tokens)
    until(lambda: decode.fetches and prefill.leases, prefill, decode)
    assert (decode.fetches[0].error, prefill.leases[0].error) == (None, None)
    assert decode.rank.holds([20, 21, 22], 1, slots)
    assert not prefill.glue.is_busy


def test_what_a_failed_pass_did_not_finish_is_not_fetched(pair):
    prefill, decode = pair
    open_lease(prefill, decode, slots=[3, 9], tokens=2 * BLOCK)
    decode.glue.handle([StartFetch("r", (20, 21), 0)])
    compute(prefill, 2 * BLOCK, computed=())
    prefill.glue.handle([WithdrawLease("r", "its copy failed")])
    until(lambda: decode.fetches and prefill.leases, prefill, decode)
    assert "its copy failed" in decode.fetches[0].error
    assert prefill.leases[0].error == "its copy failed"
    assert not is_held(prefill, [3, 9])


def test_a_command_that_cannot_be_carried_out_fails_alone(pair):
    prefill, decode = pair
    decode.glue.handle([StartFetch("r", (20, 21), 0), StartFetch("other", (21,), 0), CancelFetch("nothing", "gone")])
    prefill.glue.handle([StartFetch("r", (1,), 0), CancelFetch("r", "gone"), WithdrawLease("nothing", "gone")])
    decode.turn()
    prefill.turn()
    assert [(each.request_id, each.failed_slots) for each in decode.fetches] == [("other", (21,))]
    assert "role is not decode" in prefill.fetches[0].error
    open_lease(prefill, slots=[1], tokens=BLOCK)
    open_lease(prefill, decode, slots=[1], tokens=BLOCK)
    open_lease(prefill, decode, slots=[2], tokens=BLOCK)
    prefill.turn()
    assert [each.error for each in prefill.leases] == [
        "lease 'r' is offered to no rank of a decode server",
        "lease 'r': request 'r' has one already",
    ]
    decode.glue.handle([CancelFetch("r", "not wanted")])
    decode.turn()
    assert decode.fetches[-1].error == "not wanted"


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_closing_ends_what_is_open_and_tells_it(pair, first):
    prefill, decode = pair
    decode.glue.handle([StartFetch("r", (20, 21), 0)])
    open_lease(prefill, decode, slots=[3, 9], tokens=2 * BLOCK)
    until(lambda: decode.glue._fetches.num_offers, prefill, decode)
    closing = {"prefill": prefill, "decode": decode}[first]
    closing.glue.close()
    news = closing.glue.take_news()
    assert [end.error for end in (*news.leases, *news.fetches)] == [f"the {first} server is stopping"]
    assert closing.rank.plane.is_dead
    prefill.net.settle()
    assert all(link.is_closed for link in prefill.net.links)


def test_an_address_that_is_a_secret_is_told_to_peers_only(ranks):
    rank = ranks(DecodeRank)
    assert RankTransfers(rank.ours, rank.plane, rank.hazards).plane_address == rank.plane.address()
    rank.plane.address_is_secret = True
    assert RankTransfers(rank.ours, rank.plane, rank.hazards).plane_address == b""
