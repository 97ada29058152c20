"""What is special about the Paddle operators: dtypes, in place, streams, page-locked memory."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from fastdeploy_kvcache_v1.errors import CacheStateError, ConfigError
from fastdeploy_kvcache_v1.worker import ops
from fastdeploy_kvcache_v1.worker.ops import paddle_ops
from fastdeploy_kvcache_v1.worker.ops.queues import Queue

paddle = pytest.importorskip("paddle")

if not paddle_ops.LIBRARY.exists():
    pytest.skip("the Paddle operators are not built: scripts/build_ops.sh", allow_module_level=True)

DTYPES = ["bfloat16", "float16", "float32", "uint8", "float8_e4m3fn", "float8_e5m2"]
BLOCKS, NUMBERS = 5, 24


def make_caches(dtype: str, count: int) -> list[paddle.Tensor]:
    numbers = np.arange(BLOCKS * NUMBERS).reshape(BLOCKS, 2, 3, NUMBERS // 6) % 100
    return [paddle.to_tensor(numbers + 1 + i, dtype="float32").cast(dtype) for i in range(count)]


def values(tensor: paddle.Tensor) -> np.ndarray:
    return tensor.cast("float32").numpy()


class Pool:
    def __init__(self, block_bytes: int) -> None:
        self.array = np.full((7, block_bytes), 0xAA, np.uint8)
        self.host = paddle_ops.HostBlocks(self.array.ctypes.data, 7, block_bytes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stream", ["calling thread", "queue"])
def test_a_round_trip_in_place(dtype, stream):
    """Two layers of two roles out at once, back layer by layer, into the same tensors."""
    caches = make_caches(dtype, 4)
    row = NUMBERS * caches[0].element_size()
    pool = Pool(4 * row)
    queue = Queue(ops.COMPILED.library, "paddle") if stream == "queue" else None
    handle = queue.id if queue else 0
    originals, addresses = [values(cache) for cache in caches], [cache.data_ptr() for cache in caches]

    paddle_ops.swap_cache_all_layers(caches, pool.host, [1, 2, 4], [6, 0, 3], stream=handle)
    for layer in range(2):
        pair = caches[2 * layer : 2 * layer + 2]
        offset = 2 * row * layer
        arguments = (pair, pool.host, offset, [0, 3], [6, 3])
        if layer:
            paddle_ops.swap_cache_per_layer(*arguments, to_device=True, stream=handle)
        else:
            paddle_ops.swap_cache_per_layer_async(*arguments, to_device=True, stream=handle)
    if queue:
        assert queue.record().wait(20_000_000_000)
        queue.close()
    for cache, original in zip(caches, originals, strict=True):
        expected = original.copy()
        expected[[0, 3]] = original[[1, 4]]
        assert (values(cache) == expected).all()
    assert [cache.data_ptr() for cache in caches] == addresses
    assert (pool.array[[1, 2, 4, 5]] == 0xAA).all()


def test_an_asynchronous_copy_keeps_its_tensors_and_its_place_in_the_queue():
    caches = make_caches("float32", 1)
    pool, gate = Pool(NUMBERS * 4), threading.Event()
    queue = Queue(ops.COMPILED.library, "paddle")
    queue.call(gate.wait)
    expected = caches[0].numpy()[2].tobytes()
    paddle_ops.swap_cache_per_layer_async(caches, pool.host, 0, [2], [5], to_device=False, stream=queue.id)
    event = queue.record()
    del caches
    assert not event.wait(0)
    assert (pool.array == 0xAA).all()
    gate.set()
    assert event.wait(20_000_000_000)
    assert pool.array[5].tobytes() == expected
    queue.close()


def test_wrong_arguments_are_refused_before_a_byte_moves():
    caches, row = make_caches("float16", 2), NUMBERS * 2
    pool = Pool(2 * row)
    before = [values(cache) for cache in caches]
    refused = {
        "reads row 5 of 5": {"device_slots": [0, 5], "host_slots": [1, 2]},
        "writes row 7 of 7": {"device_slots": [0, 1], "host_slots": [1, 7]},
        "not possible": {"device_slots": [0, -1], "host_slots": [1, 2]},
        "written twice": {"device_slots": [0, 1], "host_slots": [2, 2]},
        "one target slot per source slot": {"device_slots": [0, 1], "host_slots": [2]},
    }
    for message, slots in refused.items():
        with pytest.raises(CacheStateError, match=message):
            paddle_ops.swap_cache_all_layers(caches, pool.host, **slots)
    with pytest.raises(CacheStateError, match="do not fit a host block"):
        paddle_ops.swap_cache_per_layer(caches, pool.host, 1, [0], [0], to_device=False)
    with pytest.raises(CacheStateError, match="contiguous"):
        paddle_ops.swap_cache_all_layers([caches[0].transpose([0, 2, 1, 3])], pool.host, [0], [0])
    with_gradient = paddle.ones([5, 48], dtype="float16")
    with_gradient.stop_gradient = False
    with pytest.raises(CacheStateError, match="without gradient"):
        paddle_ops.swap_cache_all_layers([with_gradient], pool.host, [0], [0])
    with pytest.raises(CacheStateError, match="there is no queue"):
        paddle_ops.swap_cache_all_layers(caches, pool.host, [0], [0], stream=1 << 40)
    with pytest.raises(CacheStateError, match="host pool"):
        paddle_ops.swap_cache_all_layers(caches, paddle_ops.HostBlocks(0, 7, 2 * row), [0], [0])
    with pytest.raises(CacheStateError, match="needs cache tensors"):
        paddle_ops.swap_cache_all_layers([], pool.host, [0], [0])
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


def test_operators_for_another_paddle_are_refused():
    installed = paddle_ops.installed_paddle()
    paddle_ops.require_same_paddle(paddle_ops.LIBRARY, installed, installed)
    for built_for in ("", "3.2.0+abc", installed.partition("+")[0]):
        with pytest.raises(ConfigError, match=r"was built for Paddle .*run scripts/build_ops\.sh paddle"):
            paddle_ops.require_same_paddle(paddle_ops.LIBRARY, built_for, installed)


@pytest.fixture
def cuda_by_the_core():
    """As on a machine with a driver: the compiled core answers for CUDA."""
    compiled = ops.COMPILED
    core = {
        "swap_cache_per_layer": ops.Implementation("compiled", compiled.swap_cache_per_layer),
        "swap_cache_all_layers": ops.Implementation("compiled", compiled.swap_cache_all_layers),
    }
    previous = {name: ops.install(name, "cuda", implementation) for name, implementation in core.items()}
    yield
    for name, implementation in previous.items():
        ops.install(name, "cuda", implementation)


def test_the_operators_are_live_where_they_fit_and_the_core_else(cuda_by_the_core, monkeypatch):
    monkeypatch.setattr(paddle_ops, "_registered_here", [])
    monkeypatch.setattr(paddle_ops, "_is_registered", lambda core, name: False)
    monkeypatch.setattr(paddle_ops, "installed_paddle", lambda: "3.9.9+other")
    assert "was built for Paddle" in ops.use_paddle()
    assert ops.live()["swap_cache_per_layer.cuda"] == "compiled"
    monkeypatch.undo()
    assert ops.use_paddle() == f"live, built for {paddle_ops.installed_paddle()}"
    assert ops.live()["swap_cache_per_layer.cuda"] == ops.live()["swap_cache_all_layers.cuda"] == "paddle"
    assert ops.use_paddle().startswith("live"), "twice is once"


def test_without_a_core_for_cuda_nothing_changes():
    before = ops.live()
    if before["swap_cache_per_layer.cuda"] == "compiled":
        pytest.skip("this machine has a driver")
    assert ops.use_paddle() == "not used: the compiled core is not live for CUDA"
    assert ops.live() == before


def test_a_gpu_tensor_without_a_stream_takes_paddles_current_one(monkeypatch):
    class OnGpu:
        place = type("Place", (), {"is_gpu_place": lambda self: True})()

    class Current:
        cuda_stream = 0x5500

    monkeypatch.setattr(paddle.device.cuda, "current_stream", Current)
    assert paddle_ops._stream([OnGpu()], 0) == 0x5500
    assert paddle_ops._stream([OnGpu()], 0x7700) == 0x7700
    assert paddle_ops._stream(make_caches("float32", 1), 0) == 0
