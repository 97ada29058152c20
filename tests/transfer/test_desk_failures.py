"""Leases and fetches of both desks when something goes wrong: each ends, with its reason, and by its deadline."""

import dataclasses
import socket

import msgspec
import pytest

from fastdeploy_kvcache_v1.errors import CacheStateError, ConfigError
from fastdeploy_kvcache_v1.transfer import control_link, messages
from fastdeploy_kvcache_v1.transfer.settings import TransferSettings
from fastdeploy_kvcache_v1.transfer.socket_plane import SocketPlane
from tests.fault_proxy import Fault, FaultProxy
from tests.transfer.peer import HOST, SECRET
from tests.transfer.ranks import LAYERS, DecodeRank, PrefillRank, both_ended, geometry, result_of, until


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_a_lease_that_is_not_asked_for_ends_and_one_that_is_does_not(ranks):
    clock = Clock()
    prefill, decode = ranks(PrefillRank, clock=clock), ranks(DecodeRank)
    decode.desk.fetch("wanted", [4])
    prefill.offer("wanted", [0], decode.port)
    prefill.offer("unwanted", [1], decode.port)
    until(lambda: decode.desk.num_offers == 2, prefill, decode)
    for _ in range(4):
        clock.now += 25.0
        lease = prefill.desk._leases["wanted"]
        until(lambda each=lease: each.last_sign == clock.now, prefill, decode)
    prefill.turn()
    assert [end.lease for end in prefill.done] == ["unwanted"]
    assert "did not ask for it for 60 s" in prefill.done[0].error
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
    clock.now += 119.0
    decode.turn()
    assert decode.done == []
    clock.now += 2.0
    decode.turn()
    assert "nothing new" in result_of(decode).error
    if phase != "no offer":
        until(lambda: prefill.done, prefill, decode)
        assert "nothing new" in prefill.done[0].error


def test_late_progress_does_not_bring_a_failed_fetch_back(pair):
    prefill, decode = pair
    decode.desk.fetch("r", [4])
    prefill.offer("l", [0], decode.port, request="r")
    until(lambda: decode.desk.num_offers, prefill, decode)
    decode.desk.cancel("r")
    prefill.all_there("l", 1)
    until(lambda: prefill.done and decode.done, prefill, decode)
    for _ in range(20):
        prefill.turn()
        decode.turn()
    assert not decode.touched()
    assert len(decode.done) == 1


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


def test_bytes_that_change_under_a_lease_are_found_by_the_digest(ranks):
    """The prefill rank writes to a block between the read and its end: a transport without checksums sees nothing."""
    prefill, decode = ranks(PrefillRank), ranks(DecodeRank)
    decode.desk.fetch("r", [4, 5])
    prefill.offer("l", [0, 1], decode.port, request="r")
    prefill.desk.progress("l", 2, 2)
    until(lambda: decode.touched() and decode.desk._fetches["r"].num_bytes, prefill, decode)
    prefill.tensors[0][1][7] ^= 1
    prefill.desk.progress("l", 2, LAYERS)
    until(both_ended(prefill, decode), prefill, decode)
    assert "the digest is wrong" in result_of(decode).error
    assert result_of(decode).failed_slots == (4, 5)
    assert decode.hazards.failed([4, 5]) == [4, 5]
    assert "the digest is wrong" in prefill.done[0].error


def test_flipped_bytes_on_the_way_fail_the_fetch(ranks):
    plane = SocketPlane(HOST, SECRET, checksums=True)
    kind, host, port, nonce = msgspec.msgpack.decode(plane.address())
    proxy = FaultProxy(port)
    proxy.fault = Fault.FLIP
    address = msgspec.msgpack.encode([kind, host, int(proxy.address.rpartition(":")[2]), nonce])
    prefill, decode = ranks(PrefillRank, plane=plane, address=address), ranks(DecodeRank)
    decode.desk.fetch("r", [4, 5])
    prefill.offer("l", [0, 1], decode.port, request="r")
    prefill.all_there("l", 2)
    until(both_ended(prefill, decode), prefill, decode)
    assert "checksum" in result_of(decode).error
    assert proxy.faults_met
    proxy.close()


def test_an_unequal_cache_is_refused_and_the_lease_ends_with_the_reason(ranks):
    prefill, decode = ranks(PrefillRank, rank_geometry=geometry(model="other")), ranks(DecodeRank)
    prefill.offer("l", [0], decode.port)
    until(lambda: prefill.done, prefill, decode)
    assert "the model is 'm' here and 'other' on the peer" in prefill.done[0].error
    assert decode.desk.num_links == 0
    until(lambda: decode.desk._server.num_refused, prefill, decode)  # it counts when it has answered
    assert decode.desk._server.num_refused == 1


def test_another_secret_is_refused(ranks):
    prefill = ranks(PrefillRank, settings={"secret": b"another secret of sixteen bytes"})
    decode = ranks(DecodeRank)
    prefill.offer("l", [0], decode.port)
    until(lambda: prefill.done, prefill, decode)
    assert "shared secret" in prefill.done[0].error


def test_a_peer_that_is_not_there_ends_the_lease_and_a_later_one_is_tried_again(ranks):
    prefill = ranks(PrefillRank)
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
    prefill.offer("l", [0], port)
    until(lambda: prefill.done, prefill)
    assert "no link to" in prefill.done[0].error
    decode = ranks(DecodeRank, port=port)
    decode.desk.fetch("m", [4])
    prefill.offer("m", [0], port)
    prefill.all_there("m", 1)
    until(lambda: decode.done, prefill, decode)
    assert decode.done[0].error is None


def test_a_peer_that_says_nothing_ends_the_lease_by_the_deadline(ranks):
    prefill = ranks(PrefillRank, settings={"handshake_s": 0.2})
    with socket.create_server((HOST, 0)) as silent:
        prefill.offer("l", [0], silent.getsockname()[1])
        until(lambda: prefill.done, prefill)
    assert "in time" in prefill.done[0].error


@pytest.mark.parametrize(
    "message",
    [
        b"\xc1",
        messages.encode(messages.Welcome(geometry(), "x")),
        messages.encode(messages.Done("l")),
        messages.encode(messages.Offer("l", "r", [1], 1)),
    ],
    ids=["garbage", "welcome", "done", "offer twice"],
)
def test_a_prefill_peer_that_breaks_the_protocol_loses_its_link_only(ranks, message):
    prefill, decode = ranks(PrefillRank), ranks(DecodeRank)
    deadline = control_link.time.monotonic() + 20
    channel = control_link.connect(HOST, decode.port, deadline)
    control_link.prove_to_peer(channel, SECRET, b"control", deadline)
    hello = messages.Hello(geometry(), b"", "stranger")
    channel.send_frame(messages.encode(hello), deadline)
    assert isinstance(messages.decode(channel.receive_frame(deadline)), messages.Welcome)
    until(lambda: decode.desk.num_links == 1, decode)
    channel.send_frame(messages.encode(messages.Offer("l", "stranger's", [1], 1)), deadline)
    channel.send_frame(message, deadline)
    until(lambda: decode.desk.num_links == 0, decode)
    channel.close()
    assert decode.desk.num_offers == 0
    decode.desk.fetch("r", [4])
    prefill.offer("l", [0], decode.port, request="r")
    prefill.all_there("l", 1)
    until(lambda: decode.done, prefill, decode)
    assert decode.done[0].error is None


def test_a_connection_that_says_nothing_holds_up_nobody(ranks):
    prefill, decode = ranks(PrefillRank), ranks(DecodeRank)
    silent = [socket.create_connection((HOST, decode.port)) for _ in range(8)]
    decode.desk.fetch("r", [4])
    prefill.offer("l", [0], decode.port, request="r")
    prefill.all_there("l", 1)
    until(lambda: decode.done, prefill, decode)
    assert decode.done[0].error is None
    for each in silent:
        each.close()


def test_settings_that_cannot_work_are_refused():
    for changes in ({"secret": b"short"}, {"lease_s": 0}, {"ping_s": 10.0}, {"wait_s": -1}):
        with pytest.raises(ConfigError):
            TransferSettings(**{"secret": SECRET, **changes})
    assert dataclasses.replace(TransferSettings(secret=SECRET)).instance != TransferSettings(secret=SECRET).instance
    assert SECRET.decode() not in repr(TransferSettings(secret=SECRET))
