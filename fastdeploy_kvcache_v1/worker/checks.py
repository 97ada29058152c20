"""doctor's checks of the machine, its GPU and the copy paths."""

from __future__ import annotations

import argparse
import ctypes
import importlib
import os
import resource
import warnings
from collections.abc import Iterator
from pathlib import Path

from ..config import GIB
from ..contract.installation import Finding, missing_libraries
from ..errors import KVCacheError

PADDLE_LIBRARIES = {"libgomp.so.1": "libgomp1"}
"""System libraries with their Debian packages."""


def system_libraries(args: argparse.Namespace) -> Iterator[Finding]:
    missing = missing_libraries(PADDLE_LIBRARIES)
    yield Finding(not missing, "system libraries", f"Paddle loads {missing}" if missing else "Paddle's are installed")


def copy_ops(args: argparse.Namespace) -> Iterator[Finding]:
    from .ops.copies import cpu_paths

    yield Finding(True, "copy ops", f"on a CPU by {cpu_paths()[0].name}")


def memory(args: argparse.Namespace) -> Iterator[Finding]:
    from .runtime.base import free_host_memory

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / GIB:.2f} GiB"
    # Information only: the NVIDIA driver ignores the limit.
    yield Finding(None, "page-locked memory", f"limit {limit}, {free_host_memory() / GIB:.1f} GiB of host memory free")
    online = Path("/sys/devices/system/node/online")
    nodes = online.read_text(encoding="ascii").strip() if online.is_file() else "unknown"
    yield Finding(None, "NUMA nodes", f"{nodes}; this process may run on {len(os.sched_getaffinity(0))} CPUs")


def gpu(args: argparse.Namespace) -> Iterator[Finding]:
    yield Finding(*_gpu())


def _gpu() -> tuple[bool, str, str]:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        todo = "install one, or run `fastdeploy-kvcache serve --fastdeploy-cpu`, which needs none"
        return False, "GPU", f"got no NVIDIA driver ({error}), expected one: {todo}"
    if (status := driver.cuInit(0)) != 0:
        return False, "GPU", f"got CUDA error {status} from the driver, expected 0: look at nvidia-smi"
    count, name = ctypes.c_int(), ctypes.create_string_buffer(128)
    driver.cuDeviceGetCount(ctypes.byref(count))
    if count.value < 1:
        todo = "look at CUDA_VISIBLE_DEVICES, and at how the container was started"
        return False, "GPU", f"got 0 GPUs, expected at least 1: {todo}"
    driver.cuDeviceGetName(name, len(name), 0)
    return True, "GPU", f"{count.value} x {name.value.decode()}"


def cupy(args: argparse.Namespace) -> Iterator[Finding]:
    from .cuda.driver import cuda_of_driver, load_cupy

    module, served = load_cupy(), cuda_of_driver()
    needs = module.cuda.runtime.runtimeGetVersion() // 1000
    if 0 < served < needs:
        install = f"pip uninstall cupy-cuda{needs}x && pip install 'fastdeploy-kvcache-v1[gpu]'"
        found = f"got {module.__version__} for CUDA {needs}, expected one for the driver's CUDA {served}: {install}"
        yield Finding(False, "CuPy", found)
    else:
        yield Finding(True, "CuPy", f"{module.__version__} for CUDA {needs}")


def copy_paths(args: argparse.Namespace) -> Iterator[Finding]:
    """Try each path, as a worker does before it uses one."""
    name = "copy paths on the GPU"
    try:
        module = importlib.import_module("cupy")
        num_gpus = module.cuda.runtime.getDeviceCount()
    except Exception:  # without CuPy or a driver: other findings say so
        yield Finding(None, name, "not tried without CuPy and a GPU")
        return
    if num_gpus < 1:
        yield Finding(None, name, "no GPU here")
        return
    from .cuda import trial

    rates = trial.rates_of(0, ())
    yield Finding(bool(rates.timings), name, rates.describe())


def paddle_operators(args: argparse.Namespace) -> Iterator[Finding]:
    """Look for Paddle's operators; they are optional."""
    from .ops import paddle_ops

    name = "Paddle's copy operators"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Paddle warns of a missing compiler cache
            paddle_ops.load()
    except (ImportError, KVCacheError) as error:
        yield Finding(None, name, f"not available: {error}")
        return
    tensors = "a CPU and a GPU" if paddle_ops.copies_on_gpu() else "a CPU"
    made_for = f"built for Paddle {paddle_ops.installed_paddle()}, tensors on {tensors}"
    yield Finding(None, name, f"{made_for}; FASTDEPLOY_KVCACHE_OPS=paddle uses them")
