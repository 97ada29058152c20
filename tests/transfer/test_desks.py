"""Both desks in one process, with real sockets between them: what is read when, and what holds which slots."""

import threading
from collections import Counter

import pytest

from fastdeploy_kvcache_v1.transfer import control_link
from fastdeploy_kvcache_v1.transfer.socket_plane import SocketPlane
from fastdeploy_kvcache_v1.worker.hazards import Actor
from fastdeploy_kvcache_v1.worker.runtime.cpu import CpuEvent
from tests.transfer.peer import HOST, SECRET
from tests.transfer.ranks import LAYERS, NUM_BLOCKS, DecodeRank, PrefillRank, both_ended, geometry, result_of, until


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
    assert result.num_bytes == 5 * sum(role.block_bytes for role in geometry().roles) * LAYERS
    assert decode.holds(target, 1, source)
    assert decode.touched() == set(target)
    assert prefill.done == [("l", "r", None)]


def test_nothing_is_read_before_it_is_told_readable(pair):
    """Chunk by chunk and layer group by layer group: what was not told stays a canary, what was told arrives."""
    prefill, decode = pair
    prefill.offer("l", [0, 1, 2, 3, 4], decode.port, request="r")
    decode.desk.fetch("r", [10, 11, 12, 13, 14])
    told = [(3, 1), (3, 4), (5, 2), (5, 4)]
    layer_bytes = sum(role.block_bytes for role in geometry().roles)
    expected = 0
    for (end_block, end_layer), blocks, layers in zip(told, [3, 3, 2, 2], [1, 3, 2, 2], strict=True):
        prefill.desk.progress("l", end_block, end_layer)
        expected += blocks * layers * layer_bytes
        fetch = decode.desk._fetches["r"]
        until(lambda now=fetch, want=expected: now.num_bytes >= want, prefill, decode)
        assert fetch.num_bytes == expected
        for layer in range(LAYERS):
            arrived = {slot for slot in range(NUM_BLOCKS) if (decode.tensors[2 * layer][slot] != 0xEE).any()}
            first_chunk, second_chunk = {10, 11, 12}, {13, 14}
            if end_block == 3:
                assert arrived == (first_chunk if layer < end_layer else set())
            else:
                assert arrived == first_chunk | (second_chunk if layer < end_layer else set())
    until(both_ended(prefill, decode), prefill, decode)
    assert decode.holds([10, 11, 12, 13, 14], 1, [0, 1, 2, 3, 4])


def test_only_the_missing_tail_is_read(pair):
    prefill, decode = pair
    prefill.offer("l", [8, 9, 10, 11, 12], decode.port, request="r")
    prefill.desk.progress("l", 2, LAYERS)
    prefill.desk.progress("l", 4, LAYERS)
    prefill.desk.progress("l", 5, LAYERS)
    decode.desk.fetch("r", [1, 2], first_block=3)
    until(both_ended(prefill, decode), prefill, decode)
    assert result_of(decode).error is None
    assert decode.holds([1, 2], 1, [11, 12])
    assert decode.touched() == {1, 2}


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 2), (2, 1), (2, 4), (4, 2), (8, 2), (2, 8)])
def test_ranks_of_other_numbers_read_the_heads_they_need(ranks, prefill_tp, decode_tp):
    """There are 4 heads: with 8 ranks each head is there twice."""
    prefills = [ranks(PrefillRank, rank_geometry=geometry(prefill_tp, rank)) for rank in range(prefill_tp)]
    decodes = [ranks(DecodeRank, rank_geometry=geometry(decode_tp, rank)) for rank in range(decode_tp)]
    slots = [3, 1, 2]
    for number, decode in enumerate(decodes):
        decode.desk.fetch("r", [7, 8, 20])
        for prefill in prefills:
            prefill.offer(f"l{number}", slots, decode.port, request="r")
            prefill.all_there(f"l{number}", 3)
    until(lambda: all(decode.done for decode in decodes), *prefills, *decodes)
    for decode in decodes:
        assert result_of(decode).error is None
        assert decode.holds([7, 8, 20], 1, slots)


def test_two_thousand_blocks_cost_one_message_a_chunk_and_layer_group(monkeypatch, pair):
    """2,048 blocks in four chunks, each told in two layer groups."""
    prefill, decode = pair
    sent = Counter()
    encode = control_link.encode

    def counted(message):
        sent[type(message).__name__] += 1
        return encode(message)

    monkeypatch.setattr(control_link, "encode", counted)
    slots = [number % NUM_BLOCKS for number in range(2048)]
    prefill.offer("l", slots, decode.port, request="r")
    for end_block in range(512, 2049, 512):
        for end_layer in (2, 4):
            prefill.desk.progress("l", end_block, end_layer)
    decode.desk.fetch("r", [3, 5], first_block=2046)
    until(both_ended(prefill, decode), prefill, decode)
    assert result_of(decode).error is None
    del sent["Ping"]
    assert sent == {"Hello": 1, "Welcome": 1, "Offer": 1, "Progress": 8, "Done": 1, "Settled": 1}


def test_a_fetch_waits_for_its_step_and_for_the_uses_of_its_slots(ranks):
    prefill, plane = ranks(PrefillRank), Held()
    decode = ranks(DecodeRank, plane=plane)
    running = CpuEvent()
    decode.hazards.after(Actor.COMPUTE, running, writes=[4])
    decode.desk.fetch("r", [4, 5], after_step=7)
    prefill.offer("l", [0, 1], decode.port, request="r")
    prefill.all_there("l", 2)
    until(lambda: decode.desk.num_offers, prefill, decode)
    for decode.step in (6, 7):
        for _ in range(20):
            decode.turn()
        assert plane.num_reads == 0
    running.finish()
    until(lambda: plane.num_reads, prefill, decode)
    waits = decode.hazards.before(Actor.OUTPUT, reads=[5])
    assert [(wait.earlier, wait.needs_data) for wait in waits] == [(Actor.REMOTE, True)]
    plane.gate.set()
    until(both_ended(prefill, decode), prefill, decode)
    assert decode.holds([4, 5], 1, [0, 1])
    assert waits[0].event.done()
    assert decode.hazards.before(Actor.OUTPUT, reads=[4, 5]) == []


def test_a_fetch_that_is_cancelled_early_does_not_hide_what_still_uses_its_slots(pair):
    _, decode = pair
    running = CpuEvent()
    decode.hazards.after(Actor.COMPUTE, running, writes=[4])
    decode.desk.fetch("r", [4, 5])
    decode.turn()
    decode.desk.cancel("r")
    decode.turn()
    assert [wait.earlier for wait in decode.hazards.before(Actor.INPUT, writes=[4])] == [Actor.COMPUTE]
    running.finish()


def test_two_leases_over_one_block_hold_it_until_both_have_ended(pair):
    """A shared prefix: whichever ends first, the other one still holds it."""
    prefill, decode = pair
    for first, last in (("a", "b"), ("d", "c")):
        prefill.offer(min(first, last), [0, 1], decode.port)
        prefill.offer(max(first, last), [1, 2], decode.port)
        prefill.all_there("a" if first == "a" else "c", 2)
        prefill.all_there("b" if first == "a" else "d", 2)
        prefill.desk.withdraw(first, "aborted")
        prefill.turn()
        prefill.hazards.prune()
        assert len(prefill.hazards.before(Actor.INPUT, writes=[1])) == 1
        prefill.desk.withdraw(last, "aborted")
        assert prefill.hazards.before(Actor.INPUT, writes=[1]) == []
        prefill.hazards.check()


def test_a_lease_does_not_stop_the_passes_that_fill_its_slots(pair):
    """A prompt is offered before it is computed, chunk by chunk."""
    prefill, decode = pair
    prefill.offer("l", [0, 1, 2], decode.port, request="r")
    prefill.desk.progress("l", 1, LAYERS)
    prefill.desk.progress("l", 3, 2)
    assert prefill.hazards.before(Actor.COMPUTE, reads=[0], writes=[1, 2]) == []
    assert [wait.earlier for wait in prefill.hazards.before(Actor.COMPUTE, writes=[0])] == [Actor.REMOTE]
    prefill.desk.progress("l", 3, LAYERS)
    assert [wait.earlier for wait in prefill.hazards.before(Actor.COMPUTE, writes=[2])] == [Actor.REMOTE]
    prefill.hazards.check()


@pytest.mark.parametrize("names_come_once", [True, False])
def test_an_offer_for_a_request_that_is_not_wanted_any_more_ends_at_once_where_names_come_once(ranks, names_come_once):
    prefill, decode = ranks(PrefillRank), ranks(DecodeRank, names_come_once=names_come_once)
    decode.desk.fetch("failed", [1])
    decode.desk.cancel("failed", "no room")
    decode.desk.cancel("never fetched", "aborted")
    for number, request in enumerate(["failed", "never fetched", "other"]):
        prefill.offer(str(number), [number], decode.port, request=request)
    kept = 1 if names_come_once else 3
    until(lambda: decode.desk.num_offers == kept and len(prefill.desk) == kept, prefill, decode)
    if names_come_once:
        assert {(end.request_id, end.error) for end in prefill.done} == {
            ("failed", "no room"),
            ("never fetched", "aborted"),
        }
    for request in ("failed", "never fetched", "other"):
        decode.desk.cancel(request)


def test_a_lease_keeps_its_slots_from_being_overwritten(pair):
    prefill, decode = pair
    prefill.offer("l", [0, 1], decode.port, request="r")
    prefill.all_there("l", 2)
    assert [wait.earlier for wait in prefill.hazards.before(Actor.INPUT, writes=[1])] == [Actor.REMOTE]
    assert prefill.hazards.before(Actor.INPUT, writes=[2]) == []
    assert prefill.hazards.before(Actor.OUTPUT, reads=[1]) == []
    prefill.desk.withdraw("l", "aborted")
    assert prefill.hazards.before(Actor.INPUT, writes=[1]) == []
    prefill.desk.withdraw("l", "aborted again")
    prefill.turn()
    assert prefill.done == [("l", "r", "aborted")]


class Held(SocketPlane):
    """Reads stop at a gate, before their first byte."""

    def __init__(self):
        super().__init__(HOST, SECRET, checksums=True)
        self.gate = threading.Event()
        self.num_reads = 0

    def open(self, address, deadline):
        source = super().open(address, deadline)
        read = source.read

        def held(*arguments):
            self.num_reads += 1
            assert self.gate.wait(30)
            read(*arguments)

        source.read = held
        return source


def held_fetch(ranks, **settings):
    """A fetch whose read stands before its first byte."""
    prefill, plane = ranks(PrefillRank, **settings), Held()
    decode = ranks(DecodeRank, plane=plane)
    decode.desk.fetch("r", [4, 5])
    prefill.offer("l", [0, 1], decode.port, request="r")
    prefill.all_there("l", 2)
    until(lambda: plane.num_reads, prefill, decode)
    return prefill, decode, plane


@pytest.mark.parametrize("event", ["cancel", "withdraw", "link"])
def test_no_byte_arrives_after_a_fetch_ended(ranks, event):
    """It ends while its read stands before the first byte; its slots are given out again, and the read goes on."""
    prefill, decode, plane = held_fetch(ranks)
    if event == "cancel":
        # The gate opens while cancel waits for the read to stop.
        threading.Timer(0.2, plane.gate.set).start()
        decode.desk.cancel("r")
    else:
        if event == "withdraw":
            prefill.desk.withdraw("l", "aborted")
        else:
            next(iter(prefill.desk._opened)).close("it ends")
        threading.Timer(0.2, plane.gate.set).start()
        until(lambda: decode.done, prefill, decode)
    assert plane.gate.is_set(), "the fetch ended while its read could still begin"
    assert not decode.touched()
    decode.turn()
    result = result_of(decode)
    assert result.failed_slots == (4, 5)
    assert {"cancel": "cancelled", "withdraw": "aborted", "link": "link"}[event] in result.error
    assert decode.hazards.failed([4, 5, 6]) == [4, 5]
    until(lambda: prefill.done, prefill, decode)
    decode.desk.fetch("next", [4, 5])
    prefill.offer("l2", [6, 7], decode.port, request="next")
    prefill.all_there("l2", 2)
    until(lambda: len(decode.done) == 2, prefill, decode)
    assert decode.holds([4, 5], 1, [6, 7])
    assert decode.touched() == {4, 5}


def test_a_cancel_of_one_fetch_leaves_the_others_of_its_peer_alone(ranks):
    prefill, decode, plane = held_fetch(ranks)
    decode.desk.fetch("other", [8, 9])
    prefill.offer("m", [2, 3], decode.port, request="other")
    prefill.all_there("m", 2)
    until(lambda: decode.desk.num_offers == 2, prefill, decode)
    until(lambda: decode.desk._by_request["other"][0].num_open_reads, prefill, decode)
    decode.desk.cancel("nobody")
    threading.Timer(0.2, plane.gate.set).start()
    decode.desk.cancel("r")
    until(lambda: len(decode.done) == 2 and len(prefill.done) == 2, prefill, decode)
    assert result_of(decode, "other").error is None
    assert decode.holds([8, 9], 1, [2, 3])
    assert decode.touched() == {8, 9}
    assert sorted((end.lease, end.error) for end in prefill.done) == [("l", "it was cancelled"), ("m", None)]


def test_an_offer_that_nobody_wants_any_more_is_refused(pair):
    prefill, decode = pair
    prefill.offer("l", [0], decode.port, request="r")
    until(lambda: decode.desk.num_offers, prefill, decode)
    decode.desk.cancel("r", "the client is gone")
    until(lambda: prefill.done, prefill, decode)
    assert prefill.done == [("l", "r", "the client is gone")]
    assert decode.done == []
