"""One host pool of several ranks: what one of them writes all read, and how the end of a copy is told."""

from __future__ import annotations

import os
import socket

import pytest

from fastdeploy_kvcache_v1.errors import ConfigError, LayerSwapTimeoutError, TransferError
from fastdeploy_kvcache_v1.worker import ops
from fastdeploy_kvcache_v1.worker.cache_controller import CacheController
from fastdeploy_kvcache_v1.worker.host_share import HostShare
from fastdeploy_kvcache_v1.worker.runtime import CpuRuntime
from fastdeploy_kvcache_v1.worker.runtime.copy_faults import CopyFaults
from fastdeploy_kvcache_v1.worker.runtime.cpu import CpuEvent
from tests.worker.chosen_runtime import ChosenRuntime
from tests.worker.worker_fakes import LIMIT_S, NumpyBackend, Rig, evict, swap_in


@pytest.fixture
def pair():
    file, (to_reader, to_writer) = ops.memory_file(), socket.socketpair()
    writer, reader = HostShare(0, file, [to_reader]), HostShare(1, file, [to_writer])
    yield writer, reader
    writer.close()
    reader.close()
    os.close(file)


@pytest.fixture
def rigs(pair):
    """Their caches, alike at the start; the block in device slot N holds 10 + N."""
    made = [Rig(CpuRuntime(), share=share) for share in pair]
    for rig in made:
        rig.fill()
    yield made
    for rig in made:
        rig.close()


def test_a_swap_in_waits_for_another_ranks_eviction(rigs):
    writer, reader = rigs
    step = evict((0,), (4,)), swap_in((4,), (1,))
    reader.submit(*step)
    with pytest.raises(LayerSwapTimeoutError):
        reader.controller.drain(0)
    writer.submit(*step)
    copied = []
    for rig in rigs:
        rig.controller.drain()
        copied.append([result.num_blocks for result in rig.controller.take_results()])
        assert rig.holds_all(1, 10)
    assert copied == [[1, 1], [1]], "only the writer copies out"
    with pytest.raises(ValueError, match="read-only"):
        reader.controller.host_pool.block(0)[:] = 1


def test_what_one_rank_could_not_evict_no_rank_reads_until_it_is_evicted_again(pair):
    faults = [CopyFaults(fail={"output": [0]}), CopyFaults()]
    rigs = [Rig(CpuRuntime(delay=each), share=share) for each, share in zip(faults, pair, strict=True)]
    for source, num_failed in ((0, [2, 1]), (2, [0, 0])):
        for rig in rigs:
            rig.fill()
            rig.submit(evict((source,), (4,)))
            rig.submit(into=swap_in((4,), (1,)))
        for rig, count in zip(rigs, num_failed, strict=True):
            rig.controller.drain()
            errors = [result.error for result in rig.controller.take_results() if not result.ok]
            assert len(errors) == count
            assert all("InjectedCopyError" in error for error in errors)
            assert rig.holds_all(1, 11 if count else 12)
    for rig in rigs:
        rig.close()


def test_a_reader_asks_for_no_memory_of_its_own(pair, monkeypatch):
    asked = []
    for share in pair:
        runtime = ChosenRuntime()
        monkeypatch.setattr(runtime, "require_memory", lambda *, device_bytes, host_bytes: asked.append(host_bytes))
        Rig(runtime, share=share).close()
    needed = 6 * NumpyBackend().layout.block_bytes
    assert asked == [needed, needed, 0]


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
