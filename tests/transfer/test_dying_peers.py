"""Ranks in processes of their own that are killed, stopped and restarted in every phase of a fetch."""

import socket

import pytest

from tests.fault_proxy import Fault, FaultProxy
from tests.transfer import ranks as ask
from tests.transfer.peer import HOST
from tests.transfer.ranks import LAYERS, QUICK, DecodeRank, PrefillRank, RankProcess, make_decode, make_prefill, until

pytestmark = pytest.mark.process

SLOTS = [10, 11, 12, 13, 14, 15]
SOURCES = [0, 1, 2, 3, 4, 5]
PHASES = ["offered", "part told", "being read", "all read"]


def free_port():
    with socket.create_server((HOST, 0)) as probe:
        return probe.getsockname()[1]


class Scene:
    """A prefill rank in its own process, behind a proxy of its data plane, and a decode rank here."""

    def __init__(self):
        plane_port = free_port()
        self.proxy = FaultProxy(plane_port)
        data_port = int(self.proxy.address.rpartition(":")[2])
        self.decode = DecodeRank(settings=QUICK)
        self.prefill = RankProcess(make_prefill, seed=1, data_port=data_port, plane_port=plane_port, settings=QUICK)
        self.other = PrefillRank(seed=2)

    def reach(self, phase):
        """Until a fetch is in this phase, and goes no further by itself."""
        self.prefill.ask(ask.offer, "l", SOURCES, self.decode.port)
        if phase == "being read":
            self.proxy.fault = Fault.HANG
        self.decode.desk.fetch("l", SLOTS)
        until(lambda: self.decode.desk.num_offers, self.decode)
        if phase == "offered":
            return
        if phase == "all read":
            # The last bytes arrive, and then this rank takes no turn until the peer has gone.
            self.prefill.ask(ask.progress, "l", 6, LAYERS)
            part = self.decode.desk._by_request["l"][0]
            until(lambda: part.num_open_reads, self.decode)
            until(lambda: not self.decode.desk._read_ends.empty())
            return
        self.prefill.ask(ask.progress, "l", 6, 1)
        if phase == "part told":
            until(lambda: self.decode.desk._fetches["l"].num_bytes, self.decode)
        else:
            until(lambda: self.proxy.faults_met, self.decode)

    def serves_others(self, name):
        """Another prefill rank is read meanwhile."""
        self.other.offer(name, [7, 8], self.decode.port)
        self.other.all_there(name, 2)
        self.decode.desk.fetch(name, [30, 31])
        until(lambda: [each for each in self.decode.done if each.request_id == name], self.decode, self.other)
        assert self.decode.holds([30, 31], 2, [7, 8])

    def close(self):
        self.proxy.close()
        self.prefill.kill()
        self.other.close()
        self.decode.close()


@pytest.fixture
def scene():
    made = Scene()
    yield made
    made.close()


def the_failed(decode):
    (failed,) = [each for each in decode.done if each.request_id == "l"]
    assert failed.error is not None
    assert failed.failed_slots == tuple(SLOTS)
    return failed


@pytest.mark.parametrize("phase", PHASES)
def test_a_fetch_from_a_prefill_rank_that_is_killed_fails_and_writes_no_more(scene, phase):
    scene.reach(phase)
    scene.prefill.kill()
    until(lambda: scene.decode.done, scene.decode)
    the_failed(scene.decode)
    scene.decode.refill()
    scene.proxy.fault = Fault.NONE
    scene.serves_others("next")
    assert scene.decode.touched() == {30, 31}
    scene.decode.desk.check_idle()


@pytest.mark.parametrize("phase", PHASES)
def test_a_fetch_from_a_prefill_rank_that_stands_still_fails_for_good(scene, phase):
    """Others are served while it stands still; when it goes on, it finds its lease gone and nothing arrives."""
    scene.reach(phase)
    scene.prefill.stop()
    scene.serves_others("meanwhile")
    assert [each.request_id for each in scene.decode.done] == ["meanwhile"]
    until(lambda: len(scene.decode.done) == 2, scene.decode, scene.other)
    the_failed(scene.decode)
    scene.decode.refill()
    scene.proxy.fault = Fault.NONE
    scene.prefill.go_on()
    until(lambda: scene.prefill.ask(ask.num_open) == 0, scene.decode)
    until(lambda: scene.prefill.ask(ask.is_idle), scene.decode)
    (end,) = scene.prefill.ask(ask.done)
    # The word that all is there may have been on its way: what counts is what the decode rank reports.
    assert end.error is not None or phase == "all read"
    assert not scene.decode.touched()
    # And it is a peer like any other again.
    scene.prefill.ask(ask.offer, "again", SOURCES, scene.decode.port)
    scene.prefill.ask(ask.all_there, "again", 6)
    scene.decode.desk.fetch("again", SLOTS)
    until(lambda: len(scene.decode.done) == 3, scene.decode)
    assert scene.decode.done[-1].error is None
    assert scene.decode.holds(SLOTS, 1, SOURCES)


def test_a_prefill_rank_that_restarts_behind_the_same_port_is_another_peer(scene):
    scene.reach("part told")
    instance = next(iter(scene.decode.desk._readers)).instance
    plane_port = scene.proxy._target[1]
    data_port = int(scene.proxy.address.rpartition(":")[2])
    scene.prefill.kill()
    restarted = RankProcess(make_prefill, seed=5, data_port=data_port, plane_port=plane_port, settings=QUICK)
    try:
        restarted.ask(ask.offer, "new", SOURCES, scene.decode.port)
        restarted.ask(ask.all_there, "new", 6)
        scene.decode.desk.fetch("new", [40, 41, 42, 43, 44, 45])
        until(lambda: len(scene.decode.done) == 2, scene.decode)
        the_failed(scene.decode)
        assert scene.decode.done[-1].error is None
        assert scene.decode.holds([40, 41, 42, 43, 44, 45], 5, SOURCES)
        (link,) = scene.decode.desk._readers
        assert link.instance != instance
    finally:
        restarted.kill()


@pytest.mark.parametrize("phase", ["offered", "part told"])
@pytest.mark.parametrize("event", ["killed", "stopped"])
def test_leases_of_a_decode_rank_that_is_gone_end_and_their_blocks_are_free(phase, event):
    prefill = PrefillRank(settings=QUICK)
    decode, other = RankProcess(make_decode), DecodeRank()
    decode_port = decode.ask(ask.port)
    try:
        prefill.offer("l", SOURCES, decode_port)
        if phase == "part told":
            decode.ask(ask.fetch, "l", SLOTS)
            prefill.desk.progress("l", 3, LAYERS)
        until(lambda: prefill.desk._peers[next(iter(prefill.desk._peers))].link, prefill)
        decode.kill() if event == "killed" else decode.stop()
        # Others are served meanwhile.
        other.desk.fetch("m", [1, 2])
        prefill.offer("m", [8, 9], other.port)
        prefill.all_there("m", 2)
        until(lambda: other.done, prefill, other)
        assert other.holds([1, 2], 1, [8, 9])
        until(lambda: len(prefill.done) == 2, prefill, other)
        ends = {end.lease: end.error for end in prefill.done}
        assert ends["m"] is None
        assert ends["l"] is not None
        assert ask.is_idle(prefill)
        if event == "stopped":
            decode.go_on()
            if phase == "part told":
                until(lambda: decode.ask(ask.done), prefill)
                assert decode.ask(ask.done)[0].failed_slots == tuple(SLOTS)
            until(lambda: decode.ask(ask.is_idle), prefill)
    finally:
        decode.kill()
        prefill.close()
        other.close()


def test_a_burst_of_requests_from_one_prefill_rank_to_three_decode_ranks_loses_none():
    """64 requests at once, before any link is there."""
    prefill = PrefillRank()
    decodes = [DecodeRank() for _ in range(3)]
    for number in range(64):
        name, decode = f"r{number}", decodes[number % 3]
        prefill.offer(name, [number % 60, number % 60 + 1], decode.port)
        prefill.all_there(name, 2)
        decode.desk.fetch(name, [2 * (number // 3), 2 * (number // 3) + 1])
    until(lambda: sum(len(decode.done) for decode in decodes) == 64, prefill, *decodes)
    assert [each.error for decode in decodes for each in decode.done] == [None] * 64
    for number in range(64):
        slot, source = 2 * (number // 3), number % 60
        assert decodes[number % 3].holds([slot, slot + 1], 1, [source, source + 1])
    until(lambda: len(prefill.done) == 64, prefill, *decodes)
    for rank in (prefill, *decodes):
        assert ask.is_idle(rank)
        rank.close()
