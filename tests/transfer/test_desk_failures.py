"""Leases and fetches of both desks when something goes wrong: each ends, with its reason, and by its deadline."""

import dataclasses
import re
from collections import deque

import pytest

from fastdeploy_kvcache_v1.errors import CacheStateError, ConfigError, InvariantError
from fastdeploy_kvcache_v1.transfer import fetch_desk
from fastdeploy_kvcache_v1.transfer.messages import Done, Hello, Offer, Progress, Settled, Welcome, Withdraw, encode
from fastdeploy_kvcache_v1.transfer.settings import TransferSettings
from tests.transfer.planes import HOST, SECRET
from tests.transfer.ranks import LAYERS, DecodeRank, PrefillRank, both_ended, geometry, result_of, until
from tests.world.streams import Clock


def test_a_lease_that_is_not_asked_for_ends_and_one_that_is_does_not(ranks):
    clock = Clock()
    prefill, decode = ranks(PrefillRank, clock=clock), ranks(DecodeRank)
    decode.desk.fetch("wanted", [4])
    prefill.offer("wanted", [0], decode.port)
    prefill.offer("unwanted", [1], decode.port)
    until(lambda: decode.desk.num_offers == 2, prefill, decode)
    decode.turn()
    for clock.now, num_ended in ((30.0, 0), (60.0, 0), (60.5, 1), (120.0, 1)):
        decode.net.ping()
        prefill.turn()
        assert len(prefill.done) == num_ended
    assert [end.lease for end in prefill.done] == ["unwanted"]
    assert "did not request it for 60 s" in prefill.done[0].error
    until(lambda: decode.desk.num_offers == 1, prefill, decode)
    prefill.all_there("wanted", 1)
    until(lambda: decode.done, prefill, decode)
    assert decode.done[0].error is None


@pytest.mark.parametrize("phase", ["no offer", "no progress", "no step"])
def test_a_fetch_that_hears_nothing_new_fails(ranks, phase):
    clock = Clock()
    prefill, decode = ranks(PrefillRank), ranks(DecodeRank, clock=clock)
    decode.desk.fetch("r", [4], after_step=9 if phase == "no step" else -1)
    if phase != "no offer":
        prefill.offer("l", [0], decode.port, request="r")
        until(lambda: decode.desk.num_offers, prefill, decode)
    clock.now = 120.0
    decode.turn()
    assert decode.done == []
    clock.now = 120.5
    decode.turn()
    assert "no progress" in result_of(decode).error
    if phase != "no offer":
        until(lambda: prefill.done, prefill, decode)
        assert "no progress" in prefill.done[0].error


@pytest.mark.parametrize(
    "told", [[(6, 1)], [(3, LAYERS + 1)], [(3, 2), (5, 4)], [(3, 2), (3, 2)], [(3, 4), (2, 4)], [(3, 0)]]
)
def test_impossible_progress_fails_the_fetch(pair, told):
    """More blocks than offered, more layers than there are, a chunk before the last one is complete, and back."""
    prefill, decode = pair
    decode.desk.fetch("r", [4, 5, 6, 7, 8])
    prefill.offer("l", [0, 1, 2, 3, 4], decode.port, request="r")
    for each in told:
        prefill.desk.progress("l", *each)
    until(both_ended(prefill, decode), prefill, decode)
    assert "the prefill server says that" in result_of(decode).error


def test_fewer_blocks_than_wanted_fail_the_fetch(pair):
    prefill, decode = pair
    decode.desk.fetch("r", [4, 5, 6])
    prefill.offer("l", [0, 1], decode.port, request="r")
    until(both_ended(prefill, decode), prefill, decode)
    assert "3 blocks are wanted, 2 are offered" in result_of(decode).error


def test_the_same_request_offered_twice_is_refused_once(pair):
    prefill, decode = pair
    prefill.offer("l", [0], decode.port, request="r")
    prefill.offer("again", [1], decode.port, request="r")
    until(lambda: prefill.done, prefill, decode)
    assert [end.lease for end in prefill.done] == ["again"]
    assert "offered already" in prefill.done[0].error
    assert decode.desk.num_refused_offers == 1
    prefill.all_there("l", 1)
    decode.desk.fetch("r", [4])
    until(lambda: decode.done, prefill, decode)
    assert decode.holds([4], 1, [0])


def test_more_offers_than_a_desk_keeps_are_refused(pair, monkeypatch):
    monkeypatch.setattr(fetch_desk, "MAX_OFFERS", 2)
    prefill, decode = pair
    for number in range(3):
        prefill.offer(str(number), [number], decode.port)
    until(lambda: prefill.done, prefill, decode)
    assert prefill.done == [("2", "2", "2 offers are open already")]
    for number in range(2):
        decode.desk.cancel(str(number))
    until(lambda: len(prefill.done) == 3, prefill, decode)
    prefill.offer("3", [3], decode.port)
    until(lambda: decode.desk.num_offers, prefill, decode)
    decode.desk.cancel("3")


def test_only_the_latest_names_that_come_once_are_remembered(ranks, monkeypatch):
    monkeypatch.setattr(fetch_desk, "MAX_OFFERS", 2)
    prefill, decode = ranks(PrefillRank), ranks(DecodeRank, names_come_once=True)
    for name in ("oldest", "older", "old"):
        decode.desk.cancel(name, "aborted")
    for number, name in enumerate(("old", "older", "oldest")):
        prefill.offer(name, [number], decode.port)
    until(lambda: decode.desk.num_offers and len(prefill.done) == 2, prefill, decode)
    assert len(prefill.desk) == 1
    assert {end.request_id for end in prefill.done} == {"old", "older"}
    decode.desk.cancel("oldest")


def test_bugs_of_the_caller_are_refused_and_change_nothing(pair):
    prefill, decode = pair
    decode.desk.fetch("r", [4, 5])
    for request, slots in (("r", [6]), ("s", [5, 6]), ("s", [6, 6])):
        with pytest.raises(CacheStateError):
            decode.desk.fetch(request, slots)
    prefill.offer("l", [0], decode.port)
    for lease, request in (("l", "l"), ("n" * 129, "r"), ("", "r"), ("m", "r" * 513), ("m", "\ud800")):
        with pytest.raises(CacheStateError):
            prefill.offer(lease, [0], decode.port, request=request)
    assert len(prefill.desk) == 1
    assert len(decode.desk) == 1
    prefill.desk.close()
    with pytest.raises(CacheStateError, match="is closed"):
        prefill.offer("m", [1], decode.port)


def test_bytes_that_change_under_a_lease_are_found_by_the_digest(pair):
    """The prefill rank writes to a block between the read and its end: a transport without checksums sees nothing."""
    prefill, decode = pair
    decode.desk.fetch("r", [4, 5])
    prefill.offer("l", [0, 1], decode.port, request="r")
    prefill.desk.progress("l", 2, 2)
    until(decode.touched, prefill, decode)
    prefill.tensors[0][1][7] ^= 1
    prefill.desk.progress("l", 2, LAYERS)
    until(both_ended(prefill, decode), prefill, decode)
    assert "checksum mismatch" in result_of(decode).error
    assert result_of(decode).failed_slots == (4, 5)
    assert decode.hazards.failed([4, 5]) == [4, 5]
    assert "checksum mismatch" in prefill.done[0].error


def test_a_digest_that_cannot_be_checked_is_wrong(ranks):
    prefill, decode = ranks(PrefillRank, regions=()), ranks(DecodeRank)
    decode.desk.fetch("r", [4])
    prefill.offer("l", [0], decode.port, request="r")
    prefill.all_there("l", 1)
    until(both_ended(prefill, decode), prefill, decode)
    assert prefill.done == [("l", "r", "the digest cannot be checked here")]
    assert "cannot be checked" in result_of(decode).error


def test_an_unequal_cache_is_refused_and_the_lease_ends_with_the_reason(ranks):
    prefill, decode = ranks(PrefillRank, rank_geometry=geometry(model="other")), ranks(DecodeRank)
    prefill.offer("l", [0], decode.port)
    until(lambda: prefill.done, prefill, decode)
    assert "the model is 'm' here and 'other' on the peer" in prefill.done[0].error
    assert decode.desk.num_links == 0


def test_unreachable_peer_ends_the_lease_and_a_later_lease_tries_again(ranks):
    prefill = ranks(PrefillRank)
    prefill.offer("l", [0], 7)
    until(lambda: prefill.done, prefill)
    assert f"no link to {HOST}:7" in prefill.done[0].error
    decode = ranks(DecodeRank, port=7)
    decode.desk.fetch("m", [4])
    prefill.offer("m", [0], 7)
    prefill.all_there("m", 1)
    until(lambda: decode.done, prefill, decode)
    assert decode.done[0].error is None


FROM_PREFILL = Offer("l", "stranger's", [1], 1)


@pytest.mark.parametrize(
    ("side", "messages"),
    [
        ("decode", [b"\xc1"]),
        ("decode", [encode(Welcome(geometry(), "x"))]),
        ("decode", [encode(Done("l"))]),
        ("decode", [encode(FROM_PREFILL), encode(FROM_PREFILL)]),
        ("prefill", [encode(FROM_PREFILL)]),
        ("prefill", [encode(Hello(geometry(), b"", "x"))]),
        ("prefill", [b""]),
    ],
)
def test_peer_that_breaks_the_protocol_loses_its_link_and_its_leases(ranks, side, messages):
    prefill, other, decode = ranks(PrefillRank), ranks(PrefillRank, seed=2), ranks(DecodeRank)
    prefill.offer("mine", [0], decode.port)
    decode.desk.fetch("mine", [3])
    until(lambda: decode.desk.num_offers, prefill, decode)
    (link,) = [each for each in decode.net.links if each.name == f"to {'prefill' if side == 'prefill' else 'decode'} 0"]
    link.coming.extend(messages)
    until(lambda: decode.done and prefill.done, prefill, decode)
    assert decode.done[0].error
    assert prefill.done[0].error
    assert (decode.desk.num_links, decode.desk.num_offers) == (0, 0)
    other.offer("r", [0], decode.port)
    other.all_there("r", 1)
    decode.desk.fetch("r", [4])
    until(lambda: len(decode.done) == 2, other, decode)
    assert decode.holds([4], 2, [0])


def test_words_about_a_lease_that_is_over_or_unknown_change_nothing(pair):
    prefill, decode = pair
    prefill.offer("l", [0], decode.port)
    until(lambda: decode.desk.num_offers, prefill, decode)
    to_prefill, to_decode = decode.net.links
    to_decode.coming.extend(map(encode, [Progress("m", 1, 1), Withdraw("m", "gone"), Settled("m")]))
    to_prefill.coming.extend(map(encode, [Done("n", "not wanted"), Done("m")]))
    decode.net.settle()
    prefill.turn()
    decode.turn()
    assert to_decode.coming == deque([encode(Settled("m", "the lease had ended"))])
    assert len(prefill.desk) == decode.desk.num_offers == 1
    decode.desk.cancel("l")


def test_a_confirmation_that_was_not_asked_for_fails_the_fetch(pair):
    prefill, decode = pair
    decode.desk.fetch("l", [4])
    prefill.offer("l", [0], decode.port)
    until(lambda: decode.desk.num_offers, prefill, decode)
    decode.net.links[1].coming.append(encode(Settled("l")))
    until(lambda: decode.done, prefill, decode)
    assert "does not confirm its blocks" in decode.done[0].error


def test_reasons_of_any_length_reach_the_other_side(pair):
    prefill, decode = pair
    long = "because " * 1000
    for number in range(4):
        prefill.offer(str(number), [number], decode.port)
    decode.desk.fetch("2", [2])
    decode.desk.fetch("3", [3])
    until(lambda: decode.desk.num_offers == 4, prefill, decode)
    prefill.desk.withdraw("0", long)
    decode.desk.cancel("1", long)
    decode.desk.cancel("2", long)
    prefill.desk.withdraw("3", long)
    until(lambda: len(prefill.done) == 4 and len(decode.done) == 2, prefill, decode)
    decode.net.settle()
    prefill.turn()
    decode.turn()
    assert decode.desk.num_links == len(prefill.desk._peers) == 1
    assert all("because because" in end.error for end in (*prefill.done, *decode.done))


@pytest.mark.parametrize(
    ("side", "spoil"),
    [
        ("decode", lambda desk: desk._held.add(9)),
        ("decode", lambda desk: desk._held.remove(4)),
        ("decode", lambda desk: desk._held.symmetric_difference_update({4, 9})),
        ("decode", lambda desk: setattr(desk._fetches["r"], "slots", (4, 4))),
        ("decode", lambda desk: desk._fetches["r"].event.finish()),
        ("decode", lambda desk: desk._readers.clear()),
        ("decode", lambda desk: desk._by_request.clear()),
        ("decode", lambda desk: desk._by_request["r"].clear()),
        ("decode", lambda desk: desk._by_request["r"].append(desk._by_request["r"][0])),
        ("prefill", lambda desk: desk._leases["r"].event.finish()),
        ("prefill", lambda desk: desk._peers.clear()),
    ],
)
def test_check_sees_a_desk_that_lost_count(net, side, spoil):
    prefill, decode = PrefillRank(net), DecodeRank(net)
    prefill.offer("r", [0], decode.port)
    decode.desk.fetch("r", [4])
    until(lambda: decode.desk.num_offers, prefill, decode)
    desk = {"prefill": prefill, "decode": decode}[side].desk
    desk.check()
    with pytest.raises(InvariantError, match=r"are being fetched|leases are open"):
        desk.check_idle()
    spoil(desk)
    with pytest.raises(InvariantError) as seen:
        desk.check()
    with pytest.raises(InvariantError, match=re.escape(str(seen.value))):
        desk.check_idle()


def test_settings_that_cannot_work_are_refused():
    for changes in ({"secret": b"short"}, {"lease_s": 0}, {"ping_s": 10.0}, {"wait_s": -1}):
        with pytest.raises(ConfigError):
            TransferSettings(**{"secret": SECRET, **changes})
    assert dataclasses.replace(TransferSettings(secret=SECRET)).instance != TransferSettings(secret=SECRET).instance
    assert SECRET.decode() not in repr(TransferSettings(secret=SECRET))
