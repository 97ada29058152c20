"""One host pool of several ranks: orders of their copies, slow, failed and cut off."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from fastdeploy_kvcache_v1.errors import ConfigError, LayerSwapTimeoutError, TransferError
from fastdeploy_kvcache_v1.metadata import NO_EVICT, NO_SWAP_IN
from fastdeploy_kvcache_v1.worker import ops
from fastdeploy_kvcache_v1.worker.cache_controller import CacheController
from fastdeploy_kvcache_v1.worker.host_share import HostShare
from fastdeploy_kvcache_v1.worker.runtime import CpuRuntime
from tests.worker.worker_fakes import LIMIT_S, NumpyBackend, Rig, evict, swap_in

INPUT, OUTPUT = "kv-input", "kv-output"

A_WHILE_S = 0.05
"""In which a copy that does not wait would have ended. One that waits takes longer on any machine."""


class Gates:
    """A `delay` hook that holds streams until the test opens them, and fails the next copy on request."""

    def __init__(self):
        self.closed, self.errors = {}, {}

    def __call__(self, stream):
        if (gate := self.closed.get(stream)) is not None:
            assert gate.wait(LIMIT_S)
        if (error := self.errors.pop(stream, None)) is not None:
            raise error

    def close(self, stream):
        """From now on `stream` stops before each copy; call the result to let it go for good."""
        gate = self.closed[stream] = threading.Event()
        return gate.set


def host_shares(size):
    file = ops.memory_file()
    pairs = [socket.socketpair() for _ in range(size - 1)]
    links = [[mine for mine, _ in pairs], *([theirs] for _, theirs in pairs)]
    return [HostShare(rank, file, each) for rank, each in enumerate(links)], file


class Ranks:
    """Their caches, alike at the start; the block in device slot N holds 10 + N."""

    def __init__(self, size=2, *, timeout_s=LIMIT_S):
        self.gates = [Gates() for _ in range(size)]
        self.shares, self.file = host_shares(size)
        self.rigs = [
            Rig(CpuRuntime(delay=delay), share=share, timeout_s=timeout_s)
            for share, delay in zip(self.shares, self.gates, strict=True)
        ]
        for rig in self.rigs:
            rig.fill()

    def submit(self, out=NO_EVICT, into=NO_SWAP_IN):
        return [rig.submit(out, into) for rig in self.rigs]

    def hold(self, slot):
        """The content of a device slot by rank."""
        return [next((content for content in range(100) if rig.holds_all(slot, content)), None) for rig in self.rigs]

    def drain(self):
        for rig in self.rigs:
            rig.controller.drain(LIMIT_S)
            rig.controller.check()

    def close(self):
        for rig in self.rigs:
            rig.close()
        for share in self.shares:
            share.close()
        os.close(self.file)


@pytest.fixture
def ranks():
    ranks = Ranks()
    yield ranks
    ranks.close()


def still_runs(rig):
    with pytest.raises(LayerSwapTimeoutError):
        rig.controller.drain(A_WHILE_S)
    return True


def failures(rig):
    return [result.error for result in rig.controller.take_results() if not result.ok]


def test_what_rank_0_evicts_all_ranks_find(ranks):
    ranks.submit(evict((0, 1), (5, 3)))
    ranks.submit(into=swap_in((5, 3), (3, 2)))
    ranks.drain()
    assert ranks.hold(3) == [10, 10]
    assert ranks.hold(2) == [11, 11]
    block = ranks.rigs[0].layout.block_bytes
    copied = [[result.num_bytes for result in rig.controller.take_results()] for rig in ranks.rigs]
    assert copied == [[2 * block, 2 * block], [2 * block]], "only the writer copies out"


def test_a_reader_cannot_write_to_the_pool(ranks):
    with pytest.raises(ValueError, match="read-only"):
        ranks.rigs[1].controller.host_pool.block(0)[:] = 1
    assert ranks.rigs[0].controller.host_pool.nbytes == ranks.rigs[1].controller.host_pool.nbytes


@pytest.mark.parametrize("same_step", [False, True])
def test_a_swap_in_waits_for_another_ranks_eviction(ranks, same_step):
    writer, reader = ranks.rigs
    let_go = ranks.gates[0].close(OUTPUT)
    if same_step:
        reader.submit(evict((0,), (4,)), swap_in((4,), (1,)))
    else:
        reader.submit(evict((0,), (4,)))
        reader.submit(into=swap_in((4,), (1,)))
    assert still_runs(reader), "the writer has not even come to that step"
    writer.submit(evict((0,), (4,)), *([swap_in((4,), (1,))] if same_step else []))
    assert still_runs(reader), "and now it copies"
    let_go()
    if not same_step:
        writer.submit(into=swap_in((4,), (1,)))
    ranks.drain()
    assert ranks.hold(1) == [10, 10]


@pytest.mark.parametrize("late", ["copies", "has not come to that step"])
def test_a_host_slot_is_not_overwritten_while_another_rank_reads_it(ranks, late):
    writer, reader = ranks.rigs
    steps = [(evict((0,), (4,)), NO_SWAP_IN), (NO_EVICT, swap_in((4,), (1,))), (evict((2,), (4,)), NO_SWAP_IN)]
    let_go = ranks.gates[1].close(INPUT)
    if late == "copies":
        for step in steps:
            reader.submit(*step)
    for step in steps:
        writer.submit(*step)
    assert still_runs(writer)
    if late != "copies":
        for step in steps:
            reader.submit(*step)
    let_go()
    ranks.drain()
    assert ranks.hold(1) == [10, 10], "the old content, which the scheduler meant"
    ranks.submit(into=swap_in((4,), (5,)))
    ranks.drain()
    assert ranks.hold(5) == [12, 12], "and then the new one"


def test_every_rank_that_reads_is_waited_for():
    ranks, last = Ranks(3), 1
    let_go = [gates.close(INPUT) for gates in ranks.gates]
    ranks.submit(evict((0,), (4,)))
    counters = ranks.submit(into=swap_in((4,), (1,)))
    ranks.rigs[0].submit(evict((2,), (4,)))
    for rank in {0, 1, 2} - {last}:
        let_go[rank]()
        counters[rank].wait_all()
    assert still_runs(ranks.rigs[0])
    assert [result.step for result in ranks.rigs[0].controller.take_results()][:1] == [1]
    let_go[last]()
    for rig in ranks.rigs[1:]:
        rig.submit(evict((2,), (4,)))
    ranks.drain()
    assert ranks.hold(1) == [10, 10, 10]
    ranks.close()


def test_what_one_rank_could_not_evict_no_rank_reads(ranks):
    writer, reader = ranks.rigs
    ranks.gates[0].errors[OUTPUT] = RuntimeError("torn")
    ranks.submit(evict((0,), (4,)))
    counters = ranks.submit(into=swap_in((4,), (1,)))
    for counter in counters:
        with pytest.raises(TransferError, match="torn"):
            counter.wait_all()
    ranks.drain()
    assert [rig.controller.failed_slots([1]) for rig in ranks.rigs] == [[1], [1]]
    assert len(failures(writer)) == 2
    (error,) = failures(reader)
    assert "rank 0: RuntimeError: torn" in error
    ranks.submit(evict((2,), (4,)))  # which repairs the slot
    ranks.submit(into=swap_in((4,), (1,)))
    ranks.drain()
    assert ranks.hold(1) == [12, 12]
    assert [failures(rig) for rig in ranks.rigs] == [[], []]


def test_a_swap_in_that_a_reader_gave_up_still_holds_the_writer():
    ranks = Ranks(timeout_s=A_WHILE_S)
    writer, reader = ranks.rigs
    let_go = ranks.gates[1].close(INPUT)
    ranks.submit(evict((0,), (4,)))
    _, counter = ranks.submit(into=swap_in((4,), (1,)))
    with pytest.raises(LayerSwapTimeoutError):
        counter.wait_all()
    assert len(failures(reader)) == 1, "it was told, and its blocks may be given to others"
    ranks.submit(evict((2,), (4,)))
    assert still_runs(writer)
    let_go()
    ranks.drain()
    assert reader.holds_all(1, 10)
    ranks.close()


def cut(share):
    """As the end of its process does."""
    for peer in share._peers:
        peer.link.shutdown(socket.SHUT_RDWR)


def test_a_writer_that_ends_fails_the_swap_ins_that_wait_for_it(ranks):
    reader = ranks.rigs[1]
    reader.submit(evict((0,), (4,)))
    before = reader.submit(into=swap_in((4,), (1,)))
    assert still_runs(reader)
    cut(ranks.shares[0])
    reader.submit(evict((0,), (3,)))
    after = reader.submit(into=swap_in((3,), (2,)))
    for counter in (before, after):
        with pytest.raises(TransferError, match="rank 0 has ended"):
            counter.wait_all()


def test_a_reader_that_ends_holds_nothing(ranks):
    writer = ranks.rigs[0]
    writer.submit(evict((0,), (4,)))
    writer.submit(into=swap_in((4,), (1,)))
    writer.submit(evict((2,), (4,)))
    assert still_runs(writer)
    cut(ranks.shares[1])
    writer.controller.drain(LIMIT_S)
    assert failures(writer) == []


def test_of_two_ranks_the_one_that_is_late_shows_a_copy_that_runs(ranks):
    writer, reader = ranks.rigs
    let_go = ranks.gates[0].close(OUTPUT)
    ranks.submit(evict((0,), (4,)))
    ranks.submit(into=swap_in((4,), (1,)))
    assert [rig.controller.copy_progress()[1:] for rig in ranks.rigs] == [(1, False), (-1, True)]
    let_go()
    ranks.drain()
    let_go = ranks.gates[1].close(INPUT)
    ranks.submit(into=swap_in((4,), (5,)))
    ranks.submit(evict((2,), (4,)))
    writer.controller.device_hazards.check()
    assert reader.controller.copy_progress()[1:] == (3, False)
    assert writer.controller.copy_progress()[1:] == (-1, True)
    let_go()
    ranks.drain()
    assert [rig.controller.copy_progress()[1:] for rig in ranks.rigs] == [(-1, False)] * 2


def test_an_end_that_was_told_before_it_was_asked_for_is_kept(ranks):
    writer, reader = ranks.rigs
    writer.submit(evict((0,), (4,)))
    writer.controller.drain(LIMIT_S)
    ranks.shares[0].close()  # what was told counts
    ranks.shares[1]._peers[0]._thread.join(LIMIT_S)
    reader.submit(evict((0,), (4,)))
    reader.submit(into=swap_in((4,), (1,))).wait_all()
    assert reader.holds_all(1, 10)


def test_a_gpu_refuses_a_shared_pool(ranks):
    class Gpu(CpuRuntime):
        on_gpu = True

    with pytest.raises(ConfigError, match="needs a CPU runtime"):
        CacheController(NumpyBackend(), runtime=Gpu(), host_share=ranks.shares[0])
