"""Host memory that outlives its caches: kept for the next ones of the same size, its content void, never kept twice."""

from __future__ import annotations

import pytest

from fastdeploy_kvcache_v1.errors import CacheStateError, ConfigError
from fastdeploy_kvcache_v1.worker.ops import HostBuffer
from tests.worker.chosen_runtime import ChosenRuntime
from tests.worker.worker_fakes import Rig, swap_in, swap_out


class CountingRuntime(ChosenRuntime):
    """Which host memory is there: `live` addresses, and how often it was allocated."""

    live: list[int]
    num_allocated = 0
    host_bytes_left = 1 << 20

    def allocate_host(self, nbytes: int, **options) -> HostBuffer:
        buffer = super().allocate_host(nbytes, **options)
        self.live.append(buffer.address)
        self.num_allocated += 1
        return buffer

    def free_host(self, buffer: HostBuffer) -> None:
        self.live.remove(buffer.address)
        super().free_host(buffer)

    def require_memory(self, *, device_bytes: int, host_bytes: int) -> None:
        self.asked = device_bytes, host_bytes
        if host_bytes > self.host_bytes_left:
            raise ConfigError("the host cache needs more than there is")


@pytest.fixture
def rig():
    runtime = CountingRuntime()
    runtime.live = []
    rig = Rig(runtime, device=4, host=5)
    yield rig
    rig.controller.check()
    rig.controller.free()
    rig.controller.free()
    rig.close()
    assert runtime.live == []


def test_the_next_caches_get_the_same_memory(rig):
    (address,), controller = rig.runtime.live, rig.controller
    for _ in range(3):
        controller.free(keep_host_memory=True)
        controller.free(keep_host_memory=True)
        controller.check()
        assert (rig.runtime.live, controller.caches) == ([address], {})
        with pytest.raises(CacheStateError, match="there are no caches"):
            _ = controller.host_pool
        rig.runtime.host_bytes_left = 0  # kept memory is not asked for again
        controller.initialize_kv_cache(4, 5)
        controller.check()
        assert controller.host_pool.slot(0).ctypes.data == address
    assert rig.runtime.num_allocated == 1


@pytest.mark.parametrize("num_host_blocks", [4, 6, 0])
def test_another_size_is_allocated_anew(rig, num_host_blocks):
    rig.controller.free(keep_host_memory=True)
    rig.runtime.host_bytes_left = num_host_blocks * rig.layout.block_bytes
    rig.controller.initialize_kv_cache(4, num_host_blocks)
    rig.controller.check()
    assert len(rig.runtime.live) == (num_host_blocks > 0)
    assert rig.controller.host_pool.num_blocks == num_host_blocks


def test_tensors_made_elsewhere_get_the_kept_memory_too(rig):
    tensors, (address,) = rig.controller.caches, rig.runtime.live
    for num_host_blocks in (5, 3):
        rig.controller.free(keep_host_memory=True)
        rig.controller.attach_kv_cache(tensors, 4, num_host_blocks)
        rig.controller.check()
        assert len(rig.runtime.live) == 1
        assert rig.runtime.live == [address] or num_host_blocks == 3
        assert rig.controller.host_pool.num_blocks == num_host_blocks
    assert rig.runtime.num_allocated == 2


def no_more(*_, **__):
    raise MemoryError("no more")


@pytest.mark.parametrize("missing", ["room", "tensors", "host memory"])
@pytest.mark.parametrize("is_restart", [False, True])
def test_start_works_after_a_start_that_failed_at_any_point(rig, monkeypatch, missing, is_restart):
    """At a restart of another size the host memory of before is given back first, whatever fails then."""
    block = rig.layout.block_bytes
    rig.controller.free(keep_host_memory=is_restart)
    with monkeypatch.context() as now:
        if missing == "room":
            now.setattr(rig.runtime, "host_bytes_left", 6 * block - 1)
            now.setattr(rig.backend, "create_kv_cache", lambda *_, **__: pytest.fail("tensors are made"))
        elif missing == "tensors":
            now.setattr(rig.backend, "create_kv_cache", no_more)
        else:
            now.setattr(ChosenRuntime, "allocate_host", no_more)
        with pytest.raises((MemoryError, ConfigError), match=r"no more|more than there is"):
            rig.controller.initialize_kv_cache(4, 6)
        rig.controller.check()
        assert (rig.runtime.live, rig.controller.caches) == ([], {})
        assert missing == "host memory" or rig.runtime.asked == (4 * block, 6 * block)
    rig.controller.initialize_kv_cache(4, 6)
    rig.controller.check()


def test_copies_end_before_the_caches_go_and_do_not_reach_the_next_ones(rig):
    rig.write(0, 7)
    rig.submit(swap_out((0,), (3,)))
    before = rig.controller.host_pool.slot(3)
    rig.controller.free(keep_host_memory=True)
    assert before.any(), "the copy was made while its memory was there"
    rig.controller.initialize_kv_cache(4, 5)
    rig.arrays = rig.backend.arrays
    assert rig.controller.transfers.take_results() == []
    assert rig.controller.transfers.num_unreported == 0
    # The new life is a whole one: what it evicts is what it swaps in.
    rig.write(1, 9)
    rig.submit(swap_out((1,), (3,)), swap_in((3,), (2,))).wait_all()
    assert rig.holds(2, 9)
    assert rig.runtime.num_allocated == 1
