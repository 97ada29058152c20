"""One host pool of several ranks: orders of their copies, slow, failed and cut off."""

from __future__ import annotations

import os
import random
import socket

import pytest

from fastdeploy_kvcache_v1.errors import ConfigError, LayerSwapTimeoutError, TransferError
from fastdeploy_kvcache_v1.metadata import NO_EVICT, NO_SWAP_IN
from fastdeploy_kvcache_v1.worker import ops
from fastdeploy_kvcache_v1.worker.cache_controller import CacheController
from fastdeploy_kvcache_v1.worker.host_share import HostShare
from fastdeploy_kvcache_v1.worker.runtime import CpuRuntime
from fastdeploy_kvcache_v1.worker.runtime.cpu import CpuEvent
from tests.worker.chosen_runtime import ChosenRuntime
from tests.worker.worker_fakes import LIMIT_S, NumpyBackend, Rig, evict, swap_in

INPUT, OUTPUT = "kv-input", "kv-output"


def host_shares(size):
    file = ops.memory_file()
    pairs = [socket.socketpair() for _ in range(size - 1)]
    links = [[mine for mine, _ in pairs], *([theirs] for _, theirs in pairs)]
    return [HostShare(rank, file, each) for rank, each in enumerate(links)], file


class Ranks:
    """Their caches, alike at the start; the block in device slot N holds 10 + N. What a rank tells the others arrives
    when `meet` carries it.
    """

    def __init__(self, size=2, seed=0):
        self.shares, self.file = host_shares(size)
        self.told = [[] for _ in self.shares]
        for share, told in zip(self.shares, self.told, strict=True):
            share.tell = lambda step, finished, told=told: told.append((step, finished))
        self.rigs = [Rig(ChosenRuntime(seed + rank), share=share) for rank, share in enumerate(self.shares)]
        for rig in self.rigs:
            rig.fill()

    def submit(self, out=NO_EVICT, into=NO_SWAP_IN):
        return [rig.submit(out, into) for rig in self.rigs]

    def content_of(self, slot):
        """Of a device slot by rank."""
        return [next((content for content in range(100) if rig.holds_all(slot, content)), None) for rig in self.rigs]

    def meet(self):
        """Every copy that can run has run, and every rank has heard of it."""
        moved = True
        while moved:
            moved = any(rig.runtime.go_on() for rig in self.rigs) or self._carry()
        for rig in self.rigs:
            rig.controller.check()

    def _carry(self):
        for rank, told in enumerate(self.told):
            if told and told[0][1].done():
                step, finished = told.pop(0)
                error = finished.error
                for peer in self._listeners(rank):
                    peer._finish(step, error and TransferError(f"rank {rank}: {type(error).__name__}: {error}"))
                return True
        return False

    def _listeners(self, rank):
        if rank:
            return [self.shares[0]._peers[rank - 1]]
        return [share._peers[0] for share in self.shares[1:]]

    def close(self):
        self.meet()
        for rig in self.rigs:
            rig.close()
        for share in self.shares:
            share.close()
        os.close(self.file)


@pytest.fixture
def ranks():
    ranks = Ranks()
    yield ranks
    for rig in ranks.rigs:
        rig.runtime.held.clear()
    ranks.close()


def still_runs(rig):
    with pytest.raises(LayerSwapTimeoutError):
        rig.controller.drain(0)
    return True


def failures(rig):
    return [result.error for result in rig.controller.take_results() if not result.ok]


def test_a_swap_in_waits_for_another_ranks_eviction(ranks):
    writer, reader = ranks.rigs
    step = evict((0,), (4,)), swap_in((4,), (1,))
    reader.submit(*step)
    ranks.meet()
    assert still_runs(reader), "the writer has not even come to that step"
    let_go = writer.runtime.hold(OUTPUT)
    writer.submit(*step)
    ranks.meet()
    assert still_runs(reader), "and now it copies"
    assert [rig.controller.copy_progress()[1:] for rig in ranks.rigs] == [(1, False), (-1, True)], "the late one shows"
    let_go()
    ranks.meet()
    assert ranks.content_of(1) == [10, 10]
    assert [rig.controller.copy_progress()[1:] for rig in ranks.rigs] == [(-1, False)] * 2
    copied = [[result.num_blocks for result in rig.controller.take_results()] for rig in ranks.rigs]
    assert copied == [[1, 1], [1]], "only the writer copies out"
    with pytest.raises(ValueError, match="read-only"):
        reader.controller.host_pool.block(0)[:] = 1


def test_a_reader_asks_for_no_memory_of_its_own(pair, monkeypatch):
    asked = []
    for share in pair:
        runtime = ChosenRuntime()
        monkeypatch.setattr(runtime, "require_memory", lambda *, device_bytes, host_bytes: asked.append(host_bytes))
        Rig(runtime, share=share).close()
    needed = 6 * NumpyBackend().layout.block_bytes
    assert asked == [needed, needed, 0]


def test_what_one_rank_could_not_evict_no_rank_reads(ranks):
    writer, reader = ranks.rigs
    writer.runtime.fail_next(OUTPUT, RuntimeError("torn"))
    ranks.submit(evict((0,), (4,)))
    ranks.submit(into=swap_in((4,), (1,)))
    ranks.meet()
    assert [rig.controller.failed_slots([1]) for rig in ranks.rigs] == [[1], [1]]
    assert len(failures(writer)) == 2
    (error,) = failures(reader)
    assert "rank 0: RuntimeError: torn" in error
    ranks.submit(evict((2,), (4,)))  # which repairs the slot
    ranks.submit(into=swap_in((4,), (1,)))
    ranks.meet()
    assert ranks.content_of(1) == [12, 12]
    assert [failures(rig) for rig in ranks.rigs] == [[], []]


def test_a_swap_in_that_a_reader_gave_up_still_holds_the_writer(ranks):
    writer, reader = ranks.rigs
    let_go = reader.runtime.hold(INPUT)
    ranks.submit(evict((0,), (4,)))
    _, counter = ranks.submit(into=swap_in((4,), (1,)))
    ranks.meet()
    with pytest.raises(LayerSwapTimeoutError):
        counter.wait_all()
    assert len(failures(reader)) == 1, "it was told, and its blocks may be given to others"
    ranks.submit(evict((2,), (4,)))
    ranks.meet()
    assert still_runs(writer)
    let_go()
    ranks.meet()
    assert reader.holds_all(1, 10)


@pytest.mark.parametrize("seed", range(4))
def test_every_rank_reads_what_the_steps_say_in_any_order(seed):
    """Ranks run apart by up to three steps."""
    rng, slots = random.Random(seed), range(6)
    ranks, steps = Ranks(3, seed=10 * seed), []
    device, host = {slot: 10 + slot for slot in slots}, {}
    for _ in range(60):
        out = rng.sample(slots, rng.randrange(4))
        to = rng.sample(slots, len(out))
        host.update({target: device[source] for source, target in zip(out, to, strict=True)})
        sources = [rng.choice(sorted(host)) for _ in range(rng.randrange(4))] if host else []
        targets = rng.sample(slots, len(sources))
        device.update({target: host[source] for source, target in zip(sources, targets, strict=True)})
        into = swap_in(tuple(sources), tuple(targets)) if sources else NO_SWAP_IN
        steps.append((evict(tuple(out), tuple(to)) if out else NO_EVICT, into))
    done = [0, 0, 0]
    while min(done) < len(steps):
        rank = rng.choice([each for each in range(3) if done[each] < min(min(done) + 3, len(steps))])
        ranks.rigs[rank].submit(*steps[done[rank]])
        done[rank] += 1
        rng.choice(ranks.rigs).runtime.turn()
        ranks._carry()
    ranks.meet()
    assert [ranks.content_of(slot) for slot in slots] == [[device[slot]] * 3 for slot in slots]
    assert [failures(rig) for rig in ranks.rigs] == [[], [], []]
    ranks.close()


# ---- what ranks tell each other


@pytest.fixture
def pair():
    (writer, reader), file = host_shares(2)
    yield writer, reader
    writer.close()
    reader.close()
    os.close(file)


def test_ends_are_told_whether_they_were_asked_for_or_not(pair):
    writer, reader = pair
    good, bad = CpuEvent(), CpuEvent()
    (asked,) = reader.peers_ends(1)
    writer.tell(1, good)
    writer.tell(2, bad)
    assert not asked.done()
    good.finish()
    asked.wait(LIMIT_S)
    bad.finish(OSError("torn"))
    writer.close()  # what has ended is told
    assert not writer._teller.is_alive()
    reader._peers[0]._thread.join(LIMIT_S)
    (told_before,) = reader.peers_ends(2)
    with pytest.raises(TransferError, match="rank 0: OSError: torn"):
        told_before.wait(LIMIT_S)
    assert reader._peers[0]._events == {}, "nothing is kept of what was asked for and has ended"


@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_ends_fails_what_is_waited_for(pair, lost):
    (before,) = pair[1 - lost].peers_ends(1)
    pair[lost]._peers[0].link.shutdown(socket.SHUT_RDWR)  # as the end of its process does
    assert before.wait_done(LIMIT_S)
    (after,) = pair[1 - lost].peers_ends(2)
    for event in (before, after):
        with pytest.raises(TransferError, match=f"rank {lost} has ended"):
            event.wait(LIMIT_S)


def test_a_gpu_refuses_a_shared_pool(pair):
    class Gpu(CpuRuntime):
        on_gpu = True

    with pytest.raises(ConfigError, match="needs a CPU runtime"):
        CacheController(NumpyBackend(), runtime=Gpu(), host_share=pair[0])
