"""FastDeploy's swap operators on tensors of a CPU, which Paddle they fit, and the worker's copies by them."""

from __future__ import annotations

import subprocess
from contextlib import closing, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fastdeploy_kvcache_v1.contract.messages import CopyPath
from fastdeploy_kvcache_v1.errors import CacheStateError, ConfigError
from fastdeploy_kvcache_v1.worker.cuda.runtime import CudaRuntime
from fastdeploy_kvcache_v1.worker.ops import BlockRows, LayerRows, paddle_ops, plan_spans, tensor_rows
from fastdeploy_kvcache_v1.worker.ops.copies import CHOICE, cpu_paths
from fastdeploy_kvcache_v1.worker.runtime import CpuRuntime
from tests.gpu.stand_in.fake_driver import COMPUTE
from tests.worker.ops.copies import Memory
from tests.worker.ops.native import build, compiler, run_python

paddle = pytest.importorskip("paddle")

if not paddle_ops.LIBRARY.exists():
    pytest.skip("the Paddle operators are not built: scripts/build_ops.sh", allow_module_level=True)

BLOCKS, HOST_BLOCKS, SHAPE = 6, 9, (2, 3, 4)
TO_HOST, TO_DEVICE = 0, 1
DTYPES = ("bfloat16", "float16", "float32", "uint8", "float8_e4m3fn", "float8_e5m2")
IDS = {
    "one block": ([3], [7]),
    "all in one run": ([1, 2, 3, 4], [4, 5, 6, 7]),
    "runs and single ones": ([4, 5, 0, 2], [0, 1, 8, 2]),
    "backwards": ([5, 4, 3], [1, 2, 3]),
    "none": ([], []),
}


def random_cache(rng: np.random.Generator, dtype: str) -> paddle.Tensor:
    return paddle.to_tensor(rng.integers(0, 100, (BLOCKS, *SHAPE)), dtype="float32").cast(dtype)


def content(cache: paddle.Tensor) -> np.ndarray:
    """Its bytes, uint8 `[blocks, bytes]`."""
    return tensor_rows(cache, num_rows=BLOCKS, row_bytes=cache.element_size() * 24).array


@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", [TO_HOST, TO_DEVICE])
@pytest.mark.parametrize("operator", paddle_ops.OPERATORS)
def test_the_named_blocks_are_copied_in_place_and_no_other(operator, mode, dtype, ids):
    rng = np.random.default_rng(7)
    count = 3 if operator == "swap_cache_all_layers" else 1
    caches = [random_cache(rng, dtype) for _ in range(count)]
    hosts = [rng.integers(0, 256, (HOST_BLOCKS, content(cache).shape[1]), np.uint8) for cache in caches]
    on_device, on_host = IDS[ids]
    expected = [(content(cache).copy(), host.copy()) for cache, host in zip(caches, hosts, strict=True)]
    for device, host in expected:
        if mode == TO_HOST:
            host[on_host] = device[on_device]
        else:
            device[on_device] = host[on_host]
    addresses = [host.ctypes.data for host in hosts]
    places = [cache.data_ptr() for cache in caches]
    first = (caches, addresses) if count > 1 else (caches[0], addresses[0])
    paddle_ops.run(operator, *first, HOST_BLOCKS, on_device, on_host, 0, mode)
    for cache, host, (device_after, host_after) in zip(caches, hosts, expected, strict=True):
        assert (content(cache) == device_after).all()
        assert (host == host_after).all()
    assert [cache.data_ptr() for cache in caches] == places


def test_names_and_attributes_are_upstreams():
    paddle_ops.load()
    from paddle.base.framework import OpProtoHolder
    from paddle.utils.cpp_extension.extension_utils import parse_op_info

    OpProtoHolder.instance().update_op_proto(list(paddle_ops.OPERATORS))
    blocks = ["max_block_num_cpu", "swap_block_ids_gpu", "swap_block_ids_cpu", "rank", "mode"]
    for operator in paddle_ops.OPERATORS:
        inputs, attributes, outputs = parse_op_info(operator)[:3]
        if operator == "swap_cache_all_layers":
            assert (inputs, attributes) == (["cache_gpu_tensors@VECTOR"], ["cache_cpu_ptrs", *blocks])
            assert outputs == ["cache_dst_outs@VECTOR"]
        else:
            assert (inputs, outputs, attributes) == (["cache_gpu"], ["cache_dst_out"], ["cache_cpu_ptr", *blocks])


REFUSED = [
    # what is different, message
    ({"on_device": [0, BLOCKS]}, r"swap_block_ids_gpu must be in \[0, 6\), got 6"),
    ({"on_device": [-1, 0]}, r"swap_block_ids_gpu must be in \[0, 6\), got -1"),
    ({"on_host": [0, HOST_BLOCKS]}, r"swap_block_ids_cpu must be in \[0, 9\), got 9"),
    ({"on_host": [0, -2]}, r"swap_block_ids_cpu must be in \[0, 9\), got -2"),
    ({"on_host": [0]}, "as many blocks on both sides, got 2 and 1"),
    ({"on_host": [4, 4], "mode": TO_HOST}, "block 4 is written twice"),
    ({"on_device": [4, 4], "mode": TO_DEVICE}, "block 4 is written twice"),
    ({"mode": 2}, "mode must be 0, to the host, or 1, to the device, got 2"),
    ({"host_blocks": 1 << 31}, "too many blocks"),
    ({"address": 0}, "address of the host memory"),
]


@pytest.mark.parametrize(("different", "message"), REFUSED)
def test_wrong_arguments_are_refused_before_a_byte_moves(different, message):
    given = {"on_device": [0, 1], "on_host": [2, 3], "mode": TO_HOST, "host_blocks": HOST_BLOCKS} | different
    caches = [random_cache(np.random.default_rng(seed), "float16") for seed in range(2)]
    before, host = [content(cache).copy() for cache in caches], np.full((HOST_BLOCKS, 48), 0xAA, np.uint8)
    address = given.get("address", host.ctypes.data)
    rest = (given["host_blocks"], given["on_device"], given["on_host"], 0, given["mode"])
    with pytest.raises(CacheStateError, match=message):
        paddle_ops.run("swap_cache_per_layer", caches[0], address, *rest)
    with pytest.raises(CacheStateError, match=message):
        paddle_ops.run("swap_cache_all_layers", caches, [host.ctypes.data, address], *rest)
    assert (host == 0xAA).all()
    assert all((content(cache) == old).all() for cache, old in zip(caches, before, strict=True))


def test_wrong_tensors_are_refused():
    cache, host = random_cache(np.random.default_rng(1), "float32"), np.zeros((HOST_BLOCKS, 96), np.uint8)
    with_gradient = paddle.ones([6, 24])
    with_gradient.stop_gradient = False
    rest = (HOST_BLOCKS, [0], [0], 0, TO_DEVICE)
    for wrong in (cache.transpose([0, 2, 1, 3]), with_gradient):
        with pytest.raises(CacheStateError, match="contiguous and without gradient"):
            paddle_ops.run("swap_cache_per_layer", wrong, host.ctypes.data, *rest)
    with pytest.raises(CacheStateError, match="one host address for each cache tensor, got 1 for 2"):
        paddle_ops.run("swap_cache_all_layers", [cache, cache], [host.ctypes.data], *rest)
    with pytest.raises(CacheStateError, match="needs cache tensors"):
        paddle_ops.run("swap_cache_all_layers", [], [], *rest)
    with pytest.raises(CacheStateError, match="a cache tensor is empty"):
        paddle_ops.run("swap_cache_per_layer", paddle.empty([0, 24]), host.ctypes.data, *rest)


@pytest.mark.parametrize("built_for", ["", "3.2.0+abc", paddle_ops.installed_paddle().partition("+")[0]])
def test_operators_for_another_paddle_are_refused(built_for):
    installed = paddle_ops.installed_paddle()
    paddle_ops.require_same_paddle(paddle_ops.LIBRARY, installed, installed)
    with pytest.raises(ConfigError, match=r"got _paddle_ops.* for Paddle .*run scripts/build_ops\.sh paddle"):
        paddle_ops.require_same_paddle(paddle_ops.LIBRARY, built_for, installed)


def tensors_of(memory: Memory) -> list[LayerRows]:
    """Its device tier, in tensors of Paddle's own."""
    return [
        LayerRows(
            tensor_rows(paddle.to_tensor(rows), num_rows=rows.shape[0], row_bytes=rows.shape[1]) for rows in layer
        )
        for layer in memory.tiers.device
    ]


@pytest.mark.parametrize("to_device", [False, True])
@pytest.mark.parametrize("only_layer", [None, 1])
def test_paddle_operators_copy_each_row_of_the_pool_when_chosen(monkeypatch, only_layer, to_device):
    """Roles of different sizes, of which a host block is a different number of rows."""
    monkeypatch.setenv(CHOICE, "paddle")
    memory = Memory(np.random.default_rng(3), layers=3, widths=(32, 16, 48), device_slots=7, host_slots=8)
    device = tensors_of(memory)
    on_device, on_host = [6, 0, 3, 4], [7, 1, 2, 3]
    sources, targets = (on_host, on_device) if to_device else (on_device, on_host)
    spans = plan_spans(sources, targets, num_sources=8, num_targets=8)
    after = memory.bytes.copy()
    tiers, layers = memory.tiers_in(after), range(3) if only_layer is None else [only_layer]
    for role, row in [
        pair for layer in layers for pair in zip(tiers.device[layer], tiers.host_roles[layer], strict=True)
    ]:
        if to_device:
            role[on_device] = row[on_host]
        else:
            row[on_host] = role[on_device]

    ran, run = set(), paddle_ops.run
    monkeypatch.setattr(paddle_ops, "run", lambda *call: [ran.add(call[0]), run(*call)])
    with closing(CpuRuntime().new_stream("test")) as stream:
        copies = CpuRuntime().new_copies(device, memory.host_rows)
        copy = copies.all_layers if only_layer is None else partial(copies.layer, layer=only_layer)
        stream.submit(partial(copy, stream=stream, spans=spans, to_device=to_device))
        stream.record_event().wait()
    for rows, array in zip(chain(*device), chain(*memory.tiers.device), strict=True):
        array[:] = rows.array
    assert (memory.bytes == after).all()
    assert ran == {"swap_cache_per_layer_async"}
    assert cpu_paths() == (CopyPath("in", "paddle"), CopyPath("out", "paddle"))


def test_a_pool_whose_blocks_are_no_number_of_rows_is_refused_in_a_line():
    for memory in (Memory(np.random.default_rng(), widths=(40, 12)), Memory(np.random.default_rng(), trailer=5)):
        with pytest.raises(ConfigError, match=r"whole rows.* with rows of 40 in layer 0: unset \w+$"):
            paddle_ops.PaddleCopies(tensors_of(memory), memory.host_rows)


PLACE = SimpleNamespace(is_gpu_place=lambda: True, gpu_device_id=lambda: 3)
ON_GPU = [LayerRows([BlockRows(64, 4, 16, 16, on_gpu=True, owner=SimpleNamespace(place=PLACE))])]
ON_HOST = [LayerRows([BlockRows(4096, 4, 16, 16)])]


def test_gpu_runtime_copies_by_paddle_operators_when_chosen(gpu, monkeypatch):
    monkeypatch.setenv(CHOICE, "paddle")
    monkeypatch.setattr(paddle_ops, "copies_on_gpu", lambda: True)
    runtime = CudaRuntime(compute_handle=COMPUTE)
    assert isinstance(runtime.new_copies(ON_GPU, ON_HOST), paddle_ops.PaddleCopies)
    monkeypatch.setenv(CHOICE, "cupy")
    with pytest.raises(ConfigError, match=f"unknown {CHOICE}=cupy: choose numpy or paddle, or unset it"):
        runtime.new_copies(ON_GPU, ON_GPU)


def test_on_a_gpu_the_operator_runs_on_the_stream_that_is_given(monkeypatch):
    monkeypatch.setattr(paddle_ops, "copies_on_gpu", lambda: False)
    with pytest.raises(ConfigError, match="built without nvcc, for a CPU"):
        paddle_ops.PaddleCopies(ON_GPU, ON_HOST)

    current, seen = [], []

    @contextmanager
    def guard(stream):
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(paddle_ops, "copies_on_gpu", lambda: True)
    monkeypatch.setattr(paddle, "CUDAPlace", lambda number: f"gpu {number}")
    monkeypatch.setattr(paddle.device, "get_stream_from_external", lambda handle, place: (handle, place))
    monkeypatch.setattr(paddle.device, "stream_guard", guard)
    monkeypatch.setattr(paddle_ops, "run", lambda operator, cache, *rest: seen.append((operator, *current, *rest)))
    spans = plan_spans([0, 2], [1, 3], num_sources=4, num_targets=4)
    paddle_ops.PaddleCopies(ON_GPU, ON_HOST).all_layers(SimpleNamespace(handle=0x5500), spans, to_device=True)
    assert seen == [("swap_cache_per_layer_async", (0x5500, "gpu 3"), 4096, 4, [1, 3], [0, 2], 0, TO_DEVICE)]
    assert current == []


@pytest.mark.process
def test_on_a_gpu_the_kernel_copies_on_the_tensors_stream(tmp_path):
    """FAKE CUDA runtime, whose streams stand still until somebody waits: what is enqueued in which order, tables that
    are read after the call, memory that a kernel knows by another address."""
    fake = Path(__file__).with_name("fake_cuda")
    compiler()
    root, library = build.paddle_root(), tmp_path / "ops.so"
    command = [*build.paddle_compiler(root, with_gpu=False), "-I", str(fake)]
    command += ["-O0", str(fake / "paddle_ops_test.cc"), "-o", str(library), *build.paddle_libraries(root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    done = run_python(f"from tests.worker.ops.fake_cuda import checks; checks.main({str(library)!r})")
    assert done.stdout.endswith("every byte is right\n"), done.stderr
