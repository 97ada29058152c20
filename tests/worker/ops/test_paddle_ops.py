"""What is special about the Paddle operators: dtypes, in place, streams, page-locked memory, which Paddle they fit."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from fastdeploy_kvcache_v1.errors import CacheStateError, ConfigError
from fastdeploy_kvcache_v1.worker import ops
from fastdeploy_kvcache_v1.worker.ops import paddle_ops
from fastdeploy_kvcache_v1.worker.ops.queues import Queue
from tests.worker.conftest import installed

paddle = pytest.importorskip("paddle")

if not paddle_ops.LIBRARY.exists():
    pytest.skip("the Paddle operators are not built: scripts/build_ops.sh", allow_module_level=True)

BLOCKS, NUMBERS = 5, 24
LIMIT_NS = 20_000_000_000


def make_caches(dtype: str, count: int) -> list[paddle.Tensor]:
    numbers = np.arange(BLOCKS * NUMBERS).reshape(BLOCKS, 2, 3, NUMBERS // 6) % 100
    return [paddle.to_tensor(numbers + 1 + i, dtype="float32").cast(dtype) for i in range(count)]


def values(tensor: paddle.Tensor) -> np.ndarray:
    return tensor.cast("float32").numpy()


class Pool:
    def __init__(self, block_bytes: int) -> None:
        self.array = np.full((7, block_bytes), 0xAA, np.uint8)
        self.host = paddle_ops.HostBlocks(self.array.ctypes.data, 7, block_bytes)


@pytest.fixture
def queue():
    queue = Queue(ops.COMPILED.library, "paddle")
    yield queue
    queue.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "uint8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("is_queued", [False, True])
def test_a_round_trip_in_place(queue, dtype, is_queued):
    """Two layers of two roles out at once, back layer by layer, into the same tensors."""
    caches, handle = make_caches(dtype, 4), queue.id if is_queued else 0
    row = NUMBERS * caches[0].element_size()
    pool = Pool(4 * row)
    originals, addresses = [values(cache) for cache in caches], [cache.data_ptr() for cache in caches]

    paddle_ops.swap_cache_all_layers(caches, pool.host, [1, 2, 4], [6, 0, 3], stream=handle)
    for layer, swap in enumerate((paddle_ops.swap_cache_per_layer, paddle_ops.swap_cache_per_layer_async)):
        pair = caches[2 * layer : 2 * layer + 2]
        swap(pair, pool.host, 2 * row * layer, [0, 3], [6, 3], to_device=True, stream=handle)
    assert queue.record().wait(LIMIT_NS)
    for cache, original in zip(caches, originals, strict=True):
        expected = original.copy()
        expected[[0, 3]] = original[[1, 4]]
        assert (values(cache) == expected).all()
    assert [cache.data_ptr() for cache in caches] == addresses
    assert (pool.array[[1, 2, 4, 5]] == 0xAA).all()


def test_an_asynchronous_copy_keeps_its_tensors_and_its_place_in_the_queue(queue):
    caches = make_caches("float32", 1)
    pool, gate = Pool(NUMBERS * 4), threading.Event()
    queue.call(gate.wait)
    expected = caches[0].numpy()[2].tobytes()
    paddle_ops.swap_cache_per_layer_async(caches, pool.host, 0, [2], [5], to_device=False, stream=queue.id)
    event = queue.record()
    del caches
    assert not event.wait(0)
    assert (pool.array == 0xAA).all()
    gate.set()
    assert event.wait(LIMIT_NS)
    assert pool.array[5].tobytes() == expected


def test_wrong_arguments_are_refused_before_a_byte_moves():
    caches, row = make_caches("float16", 2), NUMBERS * 2
    pool = Pool(2 * row)
    before = [values(cache) for cache in caches]
    with_gradient = paddle.ones([5, 48], dtype="float16")
    with_gradient.stop_gradient = False
    refused = [
        # tensors, device slots, host slots, what is different, message
        (caches, [0, 5], [1, 2], {}, "reads row 5 of 5"),
        (caches, [0, 1], [1, 7], {}, "writes row 7 of 7"),
        (caches, [0, -1], [1, 2], {}, "not possible"),
        (caches, [0, 1], [2, 2], {}, "written twice"),
        (caches, [0, 1], [2], {}, "one target slot per source slot"),
        ([caches[0].transpose([0, 2, 1, 3])], [0], [0], {}, "contiguous"),
        ([with_gradient], [0], [0], {}, "without gradient"),
        ([], [0], [0], {}, "needs cache tensors"),
        (caches, [0], [0], {"stream": 1 << 40}, "there is no queue"),
        (caches, [0], [0], {"host": paddle_ops.HostBlocks(0, 7, 2 * row)}, "host pool"),
    ]
    for tensors, device_slots, host_slots, more, message in refused:
        given = {"host": pool.host, "device_slots": device_slots, "host_slots": host_slots, **more}
        with pytest.raises(CacheStateError, match=message):
            paddle_ops.swap_cache_all_layers(tensors, **given)
    with pytest.raises(CacheStateError, match="do not fit a host block"):
        paddle_ops.swap_cache_per_layer(caches, pool.host, 1, [0], [0], to_device=False)
    assert (pool.array == 0xAA).all()
    assert all((values(cache) == old).all() for cache, old in zip(caches, before, strict=True))


def test_host_memory_is_given_back_once():
    address = paddle_ops.cuda_host_alloc(1 << 16)
    caches = make_caches("float32", 1)
    host = paddle_ops.HostBlocks(int(address[0]), 4, NUMBERS * 4)
    paddle_ops.swap_cache_all_layers(caches, host, [3], [1])
    paddle_ops.swap_cache_per_layer(caches, host, 0, [0], [1], to_device=True)
    assert (caches[0].numpy()[0] == caches[0].numpy()[3]).all()
    paddle_ops.cuda_host_free(address)
    assert int(address[0]) == 0
    with pytest.raises(CacheStateError, match="freed before"):
        paddle_ops.cuda_host_free(address)
    with pytest.raises(CacheStateError, match="at least one byte"):
        paddle_ops.cuda_host_alloc(0)


@pytest.mark.parametrize("built_for", ["", "3.2.0+abc", paddle_ops.installed_paddle().partition("+")[0]])
def test_operators_for_another_paddle_are_refused(built_for):
    installed_one = paddle_ops.installed_paddle()
    paddle_ops.require_same_paddle(paddle_ops.LIBRARY, installed_one, installed_one)
    with pytest.raises(ConfigError, match=r"was built for Paddle .*run scripts/build_ops\.sh paddle"):
        paddle_ops.require_same_paddle(paddle_ops.LIBRARY, built_for, installed_one)


def test_the_operators_are_live_where_they_fit_and_the_core_else(monkeypatch):
    """As on a machine with a driver, where the compiled core answers for CUDA."""
    core = {
        (op, "cuda"): ops.Implementation("compiled", getattr(ops.COMPILED, op))
        for op in ("swap_cache_per_layer", "swap_cache_all_layers")
    }
    with installed("cuda", core):
        with monkeypatch.context() as other:
            other.setattr(paddle_ops, "_registered_here", [])
            other.setattr(paddle_ops, "_is_registered", lambda core, name: False)
            other.setattr(paddle_ops, "installed_paddle", lambda: "3.9.9+other")
            assert "was built for Paddle" in ops.use_paddle()
            assert ops.live()["swap_cache_per_layer.cuda"] == "compiled"
        assert ops.use_paddle() == f"live, built for {paddle_ops.installed_paddle()}"
        assert ops.live()["swap_cache_per_layer.cuda"] == ops.live()["swap_cache_all_layers.cuda"] == "paddle"
        assert ops.use_paddle().startswith("live"), "twice is once"


def test_a_gpu_tensor_without_a_stream_takes_paddles_current_one(monkeypatch):
    on_gpu = SimpleNamespace(place=SimpleNamespace(is_gpu_place=lambda: True))
    monkeypatch.setattr(paddle.device.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0x5500))
    assert paddle_ops._stream([on_gpu], 0) == 0x5500
    assert paddle_ops._stream([on_gpu], 0x7700) == 0x7700
    assert paddle_ops._stream(make_caches("float32", 1), 0) == 0
