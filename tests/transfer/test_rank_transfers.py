"""The worker's glue over real sockets: a batch of a prefill rank becomes blocks of a decode rank, layer by layer."""

import pytest

from fastdeploy_kvcache_v1.transfer.offer_desk import PeerPort
from fastdeploy_kvcache_v1.transfer.rank_messages import CancelFetch, OpenLease, StartFetch, WithdrawLease
from fastdeploy_kvcache_v1.transfer.rank_transfers import RankTransfers
from fastdeploy_kvcache_v1.worker.hazards import Actor
from tests.transfer.peer import HOST
from tests.transfer.ranks import BLOCK, LAYERS, DecodeRank, PrefillRank, until


class Glued:
    """`RankTransfers` over the tensors of a rank whose own desk is not used."""

    def __init__(self, rank, listen=None):
        self.rank = rank
        rank.desk.close()
        self.glue = RankTransfers(rank.ours, rank.plane, rank.hazards, listen=listen)
        self.leases, self.fetches = [], []

    def turn(self):
        self.glue.turn()
        self.glue.check()
        news = self.glue.take_news()
        self.leases += news.leases
        self.fetches += news.fetches


@pytest.fixture
def pair():
    prefill = Glued(PrefillRank())
    decode = Glued(DecodeRank(), PeerPort(HOST, 0))
    yield prefill, decode
    for each in (prefill, decode):
        each.glue.close()
        each.glue.check_idle()


def open_lease(prefill, decode, slots, *, tokens, name="r"):
    prefill.glue.handle([OpenLease(name, name, tuple(slots), tokens, PeerPort(HOST, decode.glue.port))])


def compute(prefill, end, *, up_to=LAYERS, name="r"):
    prefill.glue.begin_pass([(name, end), ("a request without a lease", 7)])
    for layer in range(up_to):
        prefill.glue.layer_begins(layer)


def test_chunks_of_a_prompt_arrive_as_they_are_computed(pair):
    prefill, decode = pair
    slots, tokens = [3, 9, 4], 2 * BLOCK + 5
    open_lease(prefill, decode, slots, tokens=tokens)
    decode.glue.handle([StartFetch("r", (20, 21, 22), 0)])
    assert prefill.glue.is_busy
    assert decode.glue.is_busy
    compute(prefill, BLOCK + 3)
    prefill.glue.end_pass(["r"])
    until(lambda: 20 in decode.rank.touched(), prefill, decode)
    assert decode.rank.touched() == {20}, "the second block was not complete"
    compute(prefill, tokens)
    assert not decode.fetches
    prefill.glue.end_pass(["r"])
    until(lambda: decode.fetches and prefill.leases, prefill, decode)
    assert (decode.fetches[0].error, prefill.leases[0].error) == (None, None)
    assert decode.rank.holds([20, 21, 22], 1, slots)
    assert not prefill.glue.is_busy


def test_what_a_failed_pass_did_not_finish_is_not_fetched(pair):
    prefill, decode = pair
    open_lease(prefill, decode, [3, 9], tokens=2 * BLOCK)
    decode.glue.handle([StartFetch("r", (20, 21), 0)])
    compute(prefill, 2 * BLOCK)
    prefill.glue.end_pass([])
    prefill.glue.handle([WithdrawLease("r", "its copy failed")])
    until(lambda: decode.fetches and prefill.leases, prefill, decode)
    assert "its copy failed" in decode.fetches[0].error
    assert prefill.leases[0].error == "its copy failed"
    assert not prefill.rank.hazards.before(Actor.COMPUTE, writes=[3, 9]), "the lease holds its slots no longer"


def test_a_command_that_cannot_be_carried_out_fails_alone(pair):
    prefill, decode = pair
    decode.glue.handle([StartFetch("r", (20, 21), 0), StartFetch("other", (21,), 0), CancelFetch("nothing", "gone")])
    prefill.glue.handle([StartFetch("r", (1,), 0)])
    decode.turn()
    prefill.turn()
    assert [(each.request_id, each.failed_slots) for each in decode.fetches] == [("other", (21,))]
    assert "role is not decode" in prefill.fetches[0].error
    open_lease(prefill, decode, [1], tokens=BLOCK)
    open_lease(prefill, decode, [2], tokens=BLOCK)
    prefill.turn()
    assert [each.error for each in prefill.leases] == ["lease 'r' is open already"]
    decode.glue.handle([CancelFetch("r", "not wanted")])
    decode.turn()
    assert decode.fetches[-1].error == "not wanted"
