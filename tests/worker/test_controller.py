"""CacheController: refused input and sizes, life cycle."""

from __future__ import annotations

import pytest

from fastdeploy_kvcache_v1.contract import messages
from fastdeploy_kvcache_v1.contract.messages import NO_SWAP_IN, BlockCopies, CacheLevel, SwapStep
from fastdeploy_kvcache_v1.errors import CacheStateError, ConfigError, InvariantError, UnsupportedCopyError
from fastdeploy_kvcache_v1.worker.cache_controller import CacheController
from fastdeploy_kvcache_v1.worker.runtime import CpuRuntime
from tests.worker.worker_fakes import NumpyBackend, swap_in, swap_out


@pytest.mark.parametrize(
    ("out", "into", "message"),
    [
        (swap_out((6,), (0,)), NO_SWAP_IN, r"source slots must be in \[0, 6\)"),
        (swap_out((0,), (6,)), NO_SWAP_IN, r"target slots must be in \[0, 6\)"),
        (swap_out((0, 1), (2, 2)), NO_SWAP_IN, "writes a target slot twice"),
        (swap_out((0,), (0,)), swap_in((0,), (9,)), "target slots"),
    ],
)
def test_a_bad_step_changes_nothing(rig, out, into, message):
    with pytest.raises(CacheStateError, match=message):
        rig.submit(out, into)
    rig.controller.transfers.drain()
    assert rig.controller.transfers.take_results() == []
    assert not rig.controller.host_pool.slot(0).any()
    rig.controller.transfers.submit(SwapStep(1, (swap_out((0,), (0,)),)))


def test_a_kind_of_copy_without_a_path_is_an_error_that_names_it(rig, monkeypatch):
    store = BlockCopies(CacheLevel.HOST, CacheLevel.STORAGE, (0,), (0,))
    order = (store.kind, *messages.COPY_ORDER)
    monkeypatch.setattr(messages, "COPY_ORDER", order)  # a kind that the worker does not know yet
    with pytest.raises(UnsupportedCopyError, match="from the host tier to the storage tier"):
        rig.submit(store, swap_in((0,), (1,)))
    assert rig.controller.transfers.num_unreported == 0, "the other copies of the step are not started either"


def test_steps_come_in_order_and_once(rig):
    rig.controller.transfers.submit(SwapStep(5))
    for step in (5, 4):
        with pytest.raises(CacheStateError, match=f"swap step {step} came after step 5"):
            rig.controller.transfers.submit(SwapStep(step))


def test_free_allows_a_new_start(rig):
    rig.runtime.fail_next("kv-swap_in", OSError("lost"))
    rig.submit(into=swap_in((0,), (4,)))
    assert rig.controller.layout is rig.layout
    rig.controller.free()
    rig.controller.free()
    assert [stream._closed for stream in rig.runtime.streams] == [True]
    pool, copies = lambda: rig.controller.host_pool, lambda: rig.controller.transfers.num_unreported
    for use in (pool, copies):
        with pytest.raises(CacheStateError, match="initialize_kv_cache"):
            use()
    assert rig.controller.caches == {}
    caches = rig.controller.initialize_kv_cache(2, 0)
    assert [cache.shape[0] for cache in caches] == [2] * 6
    assert list(rig.controller.caches)[:3] == [
        "key_caches_0_rank0.device0",
        "value_caches_0_rank0.device0",
        "key_caches_1_rank0.device0",
    ]
    with pytest.raises(CacheStateError, match="exist already"):
        rig.controller.initialize_kv_cache(2, 0)
    with pytest.raises(CacheStateError, match="target slots"):
        rig.submit(swap_out((0,), (0,)))


@pytest.mark.parametrize(
    ("device", "host", "message"),
    [
        (0, 1, "cannot cache 0 device"),
        (1, -1, "-1 host blocks"),
        (1 << 50, 0, "the device cache needs"),
        (1, 1 << 50, r"the host cache \(swap space\) needs"),
    ],
)
def test_sizes_that_cannot_work_are_one_clear_line(device, host, message):
    runtime = CpuRuntime()
    controller = CacheController(NumpyBackend(), runtime=runtime)
    with pytest.raises(ConfigError, match=message) as caught:
        controller.initialize_kv_cache(device, host)
    assert "\n" not in str(caught.value)
    controller.check()
    controller.initialize_kv_cache(1, 1)
    controller.free()
    with pytest.raises(ConfigError, match="layer_timeout_s"):
        CacheController(NumpyBackend(), runtime=runtime, layer_timeout_s=0)


def test_check_sees_memory_that_is_kept_beside_caches(rig):
    rig.controller._kept = rig.controller.host_pool
    with pytest.raises(InvariantError, match="while caches are open"):
        rig.controller.check()
    rig.controller._kept = None
