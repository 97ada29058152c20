"""Both desks on one network: what is read when, and what holds which slots."""

from collections import Counter

import pytest

from fastdeploy_kvcache_v1.transfer.messages import decode as message_of
from fastdeploy_kvcache_v1.worker.hazards import Actor
from fastdeploy_kvcache_v1.worker.runtime.cpu import CpuEvent
from tests.transfer.network import MemoryNetwork
from tests.transfer.ranks import LAYERS, NUM_BLOCKS, DecodeRank, PrefillRank, Sockets, both_ended, result_of, until

over_both_networks = pytest.mark.parametrize("net", [MemoryNetwork, Sockets], indirect=True)


@over_both_networks
@pytest.mark.parametrize("order", ["offer first", "fetch first"])
def test_an_offered_request_arrives_whole_and_the_lease_ends(pair, order):
    prefill, decode = pair
    source, target = [5, 6, 7, 60, 2], [10, 11, 3, 4, 50]
    if order == "fetch first":
        decode.desk.fetch("r", target)
        decode.turn()
    prefill.offer("l", source, decode.port, request="r")
    prefill.all_there("l", 5)
    if order == "offer first":
        until(lambda: decode.desk.num_offers, prefill, decode)
        decode.desk.fetch("r", target)
    until(both_ended(prefill, decode), prefill, decode)
    result = result_of(decode)
    assert (result.error, result.failed_slots) == (None, ())
    assert result.num_bytes == 5 * sum(tensor[0].nbytes for tensor in decode.tensors)
    assert decode.holds(target, 1, source)
    assert decode.touched() == set(target)
    assert prefill.done == [("l", "r", None)]
    assert prefill.is_idle()
    assert decode.is_idle()


def test_nothing_is_read_before_it_is_told_readable(pair):
    """Chunk by chunk and layer group by layer group: what was not told stays a canary, what was told arrives."""
    prefill, decode = pair
    prefill.offer("l", [0, 1, 2, 3, 4], decode.port, request="r")
    decode.desk.fetch("r", [10, 11, 12, 13, 14])
    until(lambda: decode.desk.num_offers, prefill, decode)
    for end_block, end_layer in [(3, 1), (3, 4), (5, 2), (5, 4)]:
        prefill.desk.progress("l", end_block, end_layer)
        for _ in range(3):
            decode.net.settle()
            decode.turn()
        for layer in range(LAYERS):
            arrived = {slot for slot in range(NUM_BLOCKS) if (decode.tensors[2 * layer][slot] != 0xEE).any()}
            complete = set() if end_block == 3 else {10, 11, 12}
            told = {10, 11, 12} if end_block == 3 else {13, 14}
            assert arrived == complete | (told if layer < end_layer else set())
    until(both_ended(prefill, decode), prefill, decode)
    assert decode.holds([10, 11, 12, 13, 14], 1, [0, 1, 2, 3, 4])


def test_only_the_missing_tail_is_read(pair):
    prefill, decode = pair
    prefill.offer("l", [8, 9, 10, 11, 12], decode.port, request="r")
    for end_block in (2, 4, 5):
        prefill.desk.progress("l", end_block, LAYERS)
    decode.desk.fetch("r", [1, 2], first_block=3)
    until(both_ended(prefill, decode), prefill, decode)
    assert result_of(decode).error is None
    assert decode.holds([1, 2], 1, [11, 12])
    assert decode.touched() == {1, 2}


def test_two_thousand_blocks_cost_one_message_a_chunk_and_layer_group(pair):
    """2,048 blocks in four chunks, each told in two layer groups."""
    prefill, decode = pair
    slots = [number % NUM_BLOCKS for number in range(2048)]
    prefill.offer("l", slots, decode.port, request="r")
    for end_block in range(512, 2049, 512):
        for end_layer in (2, 4):
            prefill.desk.progress("l", end_block, end_layer)
    decode.desk.fetch("r", [3, 5], first_block=2046)
    until(both_ended(prefill, decode), prefill, decode)
    assert result_of(decode).error is None
    sent = Counter(type(message_of(frame)).__name__ for frame in decode.net.sent)
    assert sent == {"Offer": 1, "Progress": 8, "Done": 1, "Settled": 1}


def test_a_fetch_waits_for_its_step_and_for_the_uses_of_its_slots(pair):
    prefill, decode = pair
    net = decode.net
    running = CpuEvent()
    decode.hazards.after(Actor.COMPUTE, running, writes=[4])
    decode.desk.fetch("r", [4, 5], after_step=7)
    prefill.offer("l", [0, 1], decode.port, request="r")
    prefill.all_there("l", 2)
    until(lambda: decode.desk.num_offers, prefill, decode)
    for decode.step in (6, 7):
        net.settle()
        decode.turn()
        assert not net.wants_to_read()
    running.finish()
    net.held = {"read"}
    until(net.wants_to_read, prefill, decode)
    waits = decode.hazards.before(Actor.SWAP_OUT, reads=[5])
    assert [(wait.earlier, wait.needs_data) for wait in waits] == [(Actor.REMOTE, True)]
    net.held.clear()
    until(both_ended(prefill, decode), prefill, decode)
    assert decode.holds([4, 5], 1, [0, 1])
    assert waits[0].event.done()
    assert decode.hazards.before(Actor.SWAP_OUT, reads=[4, 5]) == []


def test_fetch_cancelled_early_keeps_earlier_uses_of_its_slots(pair):
    _, decode = pair
    running = CpuEvent()
    decode.hazards.after(Actor.COMPUTE, running, writes=[4])
    decode.desk.fetch("r", [4, 5])
    decode.turn()
    decode.desk.cancel("r")
    decode.turn()
    assert [wait.earlier for wait in decode.hazards.before(Actor.SWAP_IN, writes=[4])] == [Actor.COMPUTE]
    running.finish()


def test_two_leases_over_one_block_hold_it_until_both_have_ended(pair):
    """A shared prefix: whichever ends first, the other one still holds it."""
    prefill, decode = pair
    for first, last in (("a", "b"), ("d", "c")):
        prefill.offer(min(first, last), [0, 1], decode.port)
        prefill.offer(max(first, last), [1, 2], decode.port)
        prefill.all_there(first, 2)
        prefill.all_there(last, 2)
        prefill.desk.withdraw(first, "aborted")
        prefill.turn()
        prefill.hazards.prune()
        assert len(prefill.hazards.before(Actor.SWAP_IN, writes=[1])) == 1
        prefill.desk.withdraw(last, "aborted")
        assert prefill.hazards.before(Actor.SWAP_IN, writes=[1]) == []
        prefill.hazards.check()


def test_a_lease_holds_what_is_complete_from_writers_and_from_nobody_else(pair):
    """A prompt is offered before it is computed, chunk by chunk."""
    prefill, decode = pair

    def holding(actor=Actor.COMPUTE, **slots):
        return [wait.earlier for wait in prefill.hazards.before(actor, **slots)]

    prefill.offer("l", [0, 1, 2], decode.port, request="r")
    prefill.desk.progress("l", 1, LAYERS)
    prefill.desk.progress("l", 3, 2)
    assert holding(reads=[0], writes=[1, 2]) == []
    assert holding(writes=[0]) == holding(Actor.SWAP_IN, writes=[0]) == [Actor.REMOTE]
    prefill.desk.progress("l", 3, LAYERS)
    assert holding(writes=[2]) == [Actor.REMOTE]
    assert holding(Actor.SWAP_OUT, reads=[1]) == holding(writes=[3]) == []
    prefill.hazards.check()
    prefill.desk.withdraw("l", "aborted")
    assert holding(Actor.SWAP_IN, writes=[1]) == []
    prefill.desk.withdraw("l", "aborted again")
    prefill.turn()
    assert prefill.done == [("l", "r", "aborted")]


@pytest.mark.parametrize("names_come_once", [True, False])
def test_offer_for_a_cancelled_request_ends_at_once_with_unique_names(ranks, names_come_once):
    prefill, decode = ranks(PrefillRank), ranks(DecodeRank, names_come_once=names_come_once)
    decode.desk.fetch("failed", [1])
    decode.desk.cancel("failed", "no room")
    decode.desk.cancel("never fetched", "aborted")
    for number, request in enumerate(["failed", "never fetched", "other"]):
        prefill.offer(str(number), [number], decode.port, request=request)
    kept = 1 if names_come_once else 3
    until(lambda: decode.desk.num_offers == kept and len(prefill.desk) == kept, prefill, decode)
    told = {("failed", "no room"), ("never fetched", "aborted")} if names_come_once else set()
    assert {(end.request_id, end.error) for end in prefill.done} == told
    for request in ("failed", "never fetched", "other"):
        decode.desk.cancel(request)
