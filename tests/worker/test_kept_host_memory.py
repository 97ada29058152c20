"""Host memory that outlives its caches: kept for the next ones of the same size, its content void, never kept twice."""

from __future__ import annotations

import pytest

from fastdeploy_kvcache_v1.errors import CacheStateError, ConfigError, InvariantError
from fastdeploy_kvcache_v1.worker.cache_controller import CacheController
from fastdeploy_kvcache_v1.worker.ops import HostBuffer
from tests.worker.chosen_runtime import ChosenRuntime
from tests.worker.worker_fakes import NumpyBackend, Rig, evict, swap_in


class CountingRuntime(ChosenRuntime):
    """Which host memory is allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.live: list[int] = []
        self.num_allocated = 0
        self.host_bytes_left: int | None = None

    def allocate_host(self, nbytes: int, *, shared: bool = False) -> HostBuffer:
        buffer = super().allocate_host(nbytes)
        self.live.append(buffer.address)
        self.num_allocated += 1
        return buffer

    def free_host(self, buffer: HostBuffer) -> None:
        self.live.remove(buffer.address)
        super().free_host(buffer)

    def require_memory(self, *, device_bytes: int, host_bytes: int) -> None:
        if self.host_bytes_left is not None and host_bytes > self.host_bytes_left:
            raise ConfigError("the host cache needs more than there is")
        super().require_memory(device_bytes=device_bytes, host_bytes=host_bytes)


@pytest.fixture
def runtime():
    made = CountingRuntime()
    yield made
    made.close()
    assert made.live == []


@pytest.fixture
def controller(runtime):
    made = CacheController(NumpyBackend(), runtime=runtime)
    made.initialize_kv_cache(4, 5)
    yield made
    made.check()
    made.free()
    made.check()


def test_the_next_caches_get_the_same_memory(runtime, controller):
    (address,) = runtime.live
    for _ in range(3):
        controller.free(keep_host_memory=True)
        controller.check()
        assert (runtime.live, controller.caches) == ([address], {})
        with pytest.raises(CacheStateError, match="there are no caches"):
            _ = controller.host_pool
        runtime.host_bytes_left = 0  # kept memory is not asked for again
        controller.initialize_kv_cache(4, 5)
        controller.check()
        assert controller.host_pool.block(0).ctypes.data == address
    assert runtime.num_allocated == 1


@pytest.mark.parametrize("num_host_blocks", [4, 6, 0])
def test_another_size_is_allocated_anew(runtime, controller, num_host_blocks):
    controller.free(keep_host_memory=True)
    if num_host_blocks:
        runtime.host_bytes_left = 6 * controller.layout.block_bytes
    controller.initialize_kv_cache(4, num_host_blocks)
    controller.check()
    assert len(runtime.live) == (num_host_blocks > 0)
    assert controller.host_pool.num_blocks == num_host_blocks


def test_tensors_made_elsewhere_get_the_kept_memory_too(runtime, controller):
    tensors = controller.caches
    (address,) = runtime.live
    controller.free(keep_host_memory=True)
    controller.attach_kv_cache(tensors, 4, 5)
    controller.check()
    assert runtime.live == [address]
    controller.free(keep_host_memory=True)
    controller.attach_kv_cache(tensors, 4, 3)
    controller.check()
    assert (len(runtime.live), controller.host_pool.num_blocks) == (1, 3)


def test_other_blocks_are_allocated_anew(runtime):
    backend = NumpyBackend(num_layers=3)
    controller = CacheController(backend, runtime=runtime)
    controller.initialize_kv_cache(4, 6)
    controller.free(keep_host_memory=True)
    backend._layout = NumpyBackend(num_layers=2).layout
    controller.initialize_kv_cache(4, 6)
    controller.check()
    assert (len(runtime.live), runtime.num_allocated) == (1, 2)
    controller.free()


def test_a_start_that_fails_leaves_no_caches(runtime, controller):
    controller.free(keep_host_memory=True)
    runtime.host_bytes_left = 0
    with pytest.raises(ConfigError, match="needs more than there is"):
        controller.initialize_kv_cache(4, 6)
    controller.check()
    assert (runtime.live, controller.caches) == ([], {})


def test_kept_memory_is_freed_in_the_end_and_once(runtime, controller):
    controller.free(keep_host_memory=True)
    controller.free(keep_host_memory=True)
    assert len(runtime.live) == 1
    controller.free()
    controller.free()
    assert runtime.live == []


def test_check_sees_memory_kept_beside_caches(controller):
    controller._kept = controller._host
    with pytest.raises(InvariantError, match="kept for the next caches while there are some"):
        controller.check()
    controller._kept = None


def test_copies_end_before_the_caches_go_and_do_not_reach_the_next_ones(runtime):
    rig = Rig(runtime)
    rig.write_all(0, 7)
    rig.submit(evict((0,), (3,)))
    before = rig.controller.host_pool.block(3)
    rig.controller.free(keep_host_memory=True)
    assert before.any(), "the copy was made while its memory was there"
    rig.controller.initialize_kv_cache(6, 6)
    rig.arrays = rig.backend.arrays
    assert rig.controller.take_results() == []
    assert rig.controller.num_unreported_copies == 0
    # The new life is a whole one: what it evicts is what it swaps in.
    rig.write_all(1, 9)
    rig.submit(evict((1,), (3,)), swap_in((3,), (2,))).wait_all()
    assert rig.holds_all(2, 9)
    rig.controller.free()
    assert runtime.num_allocated == 1
