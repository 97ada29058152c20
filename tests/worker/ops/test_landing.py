"""Which copy paths are trusted: each fault of a path, in a process of its own over the fake driver, and what is left.

The kernel is the real one's body, compiled for the CPU.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from fastdeploy_kvcache_v1.worker.ops import landing
from tests.worker.ops.native import CUSTOM_OPS, ROOT, compile_program, require_core

pytestmark = pytest.mark.process

PROGRAM = """
import ctypes, logging, sys
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stdout)
import cupy
import numpy as np
from fastdeploy_kvcache_v1.worker import ops
from fastdeploy_kvcache_v1.worker.ops import landing, calibration
from fastdeploy_kvcache_v1.worker.runtime import CudaRuntime
from tests.worker.ops.fake_cuda import fake_cuda

landing.RELEASE_FILES = ()
fake = fake_cuda()
kernel = ctypes.CDLL(str(ops.COMPILED.library.path.with_name("_core_cuda.so")))
"""

KERNEL = """
#include "%s/cuda/kernel.h"
using namespace kvswap::cuda;
int fault = 0;  // 1: other bytes arrive, 2: this GPU has no code for it
extern "C" __attribute__((visibility("default"))) void set_fault(int value) { fault = value; }
extern "C" __attribute__((visibility("default"))) int kvswap_kernel_abi() { return kKernelAbi; }
extern "C" __attribute__((visibility("default"))) int kvswap_kernel_launch(const KernelArguments* arguments, int groups,
                                                                          int, void*) {
  if (fault == 2) return 209;
  const int warps = groups * kKernelWarps;
  for (int i = fault; i < warps; ++i)
    for (int lane = 0; lane < kLanes; ++lane) copy_rows(*arguments, {i, warps, lane});
  return 0;
}
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory) -> dict[str, str]:
    """The environment of a machine with CuPy, a driver and the copy kernel."""
    require_core()
    directory = tmp_path_factory.mktemp("machine")
    unwanted = shutil.ignore_patterns("_core_cuda.so", "_paddle_ops.so", "__pycache__")
    package = directory / "fastdeploy_kvcache_v1"
    shutil.copytree(ROOT / "fastdeploy_kvcache_v1", package, ignore=unwanted)
    shutil.copy(ROOT / "tests/worker/ops/cupy_stand_in.py", directory / "cupy.py")
    compile_program([CUSTOM_OPS / "tests/fake_libcuda.cc"], directory / "libcuda.so.1", "-fPIC", "-shared")
    compile_program([CUSTOM_OPS / "tests/fake_nvml.cc"], directory / "libnvidia-ml.so.1", "-fPIC", "-shared")
    (directory / "kernel.cc").write_text(KERNEL % CUSTOM_OPS)
    compile_program([directory / "kernel.cc"], package / "worker/ops/_core_cuda.so", "-fPIC", "-shared", "-O2")
    return {**os.environ, "PYTHONPATH": f"{directory}:{ROOT}", "LD_LIBRARY_PATH": str(directory)}


def land(machine: dict[str, str], body: str, nbytes: int = 5 << 20, **environment: str) -> str:
    """Run `body` with the runtime that landed on a pool of `nbytes`; its output."""
    before, _, after = body.partition("LAND\n")
    run = f"pool = CudaRuntime(compute_handle=1000).allocate_host({nbytes})\nlanding_ = ops.landed()\n"
    show = "print('live', *landing_.live, sep=' ')\nassert not pool.array.any()\n"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + before + run + show + after],
        env={**machine, **environment},
        cwd=machine["LD_LIBRARY_PATH"],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


COPY = """
memory = np.arange(4096, dtype=np.uint8).reshape(8, 512)
target = np.zeros((8, 512), np.uint8)
source_rows = (ops.BlockRows(memory.ctypes.data, 8, 512, 512),)
target_rows = (ops.BlockRows(target.ctypes.data, 8, 512, 512, on_gpu=True),)
ops.swap_cache_per_layer(target_rows, source_rows, [ops.CopyRun(0, 4, 1), ops.CopyRun(5, 1, 2)], stream=0x7700)
assert (target[4] == memory[0]).all() and (target[1:3] == memory[5:7]).all() and not target[0].any()
"""


def test_every_path_lives_where_nothing_is_wrong(machine):
    measured = """
assert landing_.measured and not landing_.left, landing_
assert set(landing_.costs) == {"H2D", "D2H"}
assert all(number > 0 for each in landing_.costs.values() for number in each.values())
runtime_again = CudaRuntime(compute_handle=1000)
fake.batch_fault = 1
runtime_again.allocate_host(1 << 20)
assert ops.landed() is landing_, "once per process"
"""
    output = land(machine, f"LAND\n{measured}{COPY}")
    assert "live kernel staged batch runs" in output
    assert "GPU and host: kernel, staged, batch, runs; constants measured here: H2D call_ns" in output
    assert "WARNING" not in output


SHOW = """
for path in ops.copy_paths("cuda"):
    print(path.direction, path.name, path.left or "lives")
"""


def test_a_worker_tells_which_paths_live_in_which_direction_and_why_others_do_not(machine):
    output = land(machine, f"assert not ops.copy_paths('cuda')\nfake.batch_fault = 1\nLAND\n{SHOW}")
    for line in ("in kernel lives", "in runs lives", "out kernel lives", "out staged lives", "out runs lives"):
        assert line in output.splitlines(), output
    for direction in ("in", "out"):
        assert f"\n{direction} batch a block came back with other bytes\n" in output
    assert "\nin staged" not in output, "it gathers on the device"


def test_a_path_that_fails_after_it_was_tried_is_told(machine):
    output = land(machine, f"LAND\nkernel.set_fault(2)\n{COPY}{SHOW}", FASTDEPLOY_KVCACHE_CUDA_PATH="kernel")
    for direction in ("in", "out"):
        assert f"\n{direction} kernel it was refused by the driver after it had been tried\n" in output
        assert f"\n{direction} batch FASTDEPLOY_KVCACHE_CUDA_PATH says so\n" in output
        assert f"\n{direction} runs lives\n" in output, "the last resort"


SOON = "landing.TIME_LIMIT_S = 2\n"
FAULTS = {
    "a batch loses a block": ("fake.batch_fault = 1", "kernel staged runs", "batch: a block came back with other"),
    "a batch never returns": (
        f"{SOON}fake.batch_fault = 2",
        "kernel staged runs",
        "batch: a driver call did not return",
    ),
    "batches fail": ("fake.batch_result = 1", "kernel staged runs", "batch: TransferError: cuMemcpyBatchAsync: CUDA"),
    "batches are not supported": ("fake.batch_result = 801", "kernel staged runs", "batch: ConfigError: this GPU does"),
    "a copy is never done": (
        f"{SOON}query = lambda event: 600 if fake.batches else 0\ncupy.cuda.runtime.eventQuery = query",
        "kernel staged",
        "batch: a copy of one block was not done within",
    ),
    "the kernel loses a piece": ("kernel.set_fault(1)", "batch runs", "kernel: a block came back with other bytes"),
    "no code for this GPU": (
        "kernel.set_fault(2)",
        "batch runs",
        "kernel: ConfigError: this GPU cannot run the copy kernel (CUDA error 209): build it for this GPU",
    ),
    "everything is wrong": ("fake.count_only = 1\nkernel.set_fault(1)", "cupy", "runs: a block came back with other"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_path_that_cannot_be_trusted_is_left(machine, fault):
    how, live, reason = FAULTS[fault]
    output = land(machine, f"{how}\nLAND\nfake.count_only = 0\n{COPY}{SHOW}")
    assert f"live {live}\n" in output
    shown = [line.split()[1] for line in output.splitlines() if line.startswith("out ") and line.endswith(" lives")]
    assert shown == live.split()
    lines = [line for line in output.splitlines() if line.startswith("WARNING") and reason in line]
    assert len(lines) == 1, output
    assert lines[0].startswith("WARNING copies between GPU and host do without the path ")


BREAKS = """
query = cupy.cuda.runtime.eventQuery
cupy.cuda.runtime.eventQuery = lambda event: 700 if fake.batches else query(event)
def broken(address):
    if fake.batches: raise cupy.cuda.runtime.CUDARuntimeError("cudaErrorIllegalAddress")
cupy.cuda.runtime.hostUnregister = broken
try:
    CudaRuntime(compute_handle=1000).allocate_host(5 << 20)
except Exception as error:
    print(f"{type(error).__name__}: {error}")
    sys.exit()
"""


@pytest.mark.parametrize(
    ("choice", "left_out"), [("", "-batch"), ("batch", "-batch"), ("-staged,-kernel", "-kernel,-staged,-batch")]
)
def test_a_path_that_breaks_the_context_ends_the_worker_in_words(machine, choice, left_out):
    """A broken context answers every later call with its error: one of them would fail far from here."""
    output = land(machine, f"{BREAKS}LAND\n", **{landing.CHOICE: choice})
    assert output.splitlines()[-1] == (
        "ConfigError: the CUDA context broke (CUDA error 700) when copies by batch were tried: "
        f"start again with FASTDEPLOY_KVCACHE_CUDA_PATH={left_out}"
    )


def test_a_context_that_breaks_while_paths_are_timed_ends_the_worker_in_words(machine):
    dead = "landing.calibration.calibrate = lambda *_: setattr(fake, 'batches', 1) or False\n"
    output = land(machine, f"{dead}{BREAKS}LAND\n", **{landing.CHOICE: "-batch"})
    assert "broke (CUDA error 700) when copies by kernel or staged or runs were tried" in output.splitlines()[-1]


def test_a_gpu_without_memory_makes_plain_copies_only(machine):
    full = "def full(nbytes): raise RuntimeError('out of memory')\ncupy.cuda.runtime.malloc = full\n"
    output = land(machine, f"{full}LAND\nassert not landing_.measured\n{COPY}{SHOW}")
    assert "live runs\n" in output
    assert output.count("plain copies take the place of copy paths that cannot be tried") == 1
    for path in ("kernel", "batch"):
        assert f"\nout {path} the GPU gives no memory to try it: out of memory\n" in output
    assert "WARNING fragmented blocks are not gathered" in output


UNTIL_FULL = """
LAND
tried, round_trip, malloc = set(), landing._round_trip, cupy.cuda.runtime.malloc
def note(cupy, compiled, path, memory):
    tried.add(path.name.lower())
    return round_trip(cupy, compiled, path, memory)
landing._round_trip = note
for left in range(8):
    def nearly_full(nbytes, room=iter(range(left))):
        if next(room, None) is None: raise RuntimeError("out of memory")
        return malloc(nbytes)
    cupy.cuda.runtime.malloc = nearly_full
    tried.clear()
    lives = landing.land(ops.COMPILED, cupy, 0, pool, landing.Choice()).live
    print("after", left, *lives)
    assert {"runs", *tried} == {"runs", *lives}, (lives, tried)
"""


def test_a_path_lives_only_if_it_was_tried_wherever_memory_ends(machine):
    output = land(machine, UNTIL_FULL).splitlines()
    assert [line for line in output if line.startswith("after ")] == [
        "after 0 runs",
        "after 1 runs",
        "after 2 kernel runs",
        "after 3 kernel staged runs",
        *(f"after {left} kernel staged batch runs" for left in range(4, 8)),
    ]


def test_a_small_pool_is_tried_and_not_measured(machine):
    output = land(machine, f"LAND\nassert not landing_.measured\n{COPY}", nbytes=70_000)
    assert "live kernel staged batch runs" in output
    assert "constants of the table" in output


@pytest.mark.parametrize(
    ("choice", "live", "path"),
    [
        ("kernel", "kernel", 5),
        ("batch", "batch", 4),
        ("-kernel,-staged", "batch runs", None),
        ("-batch", "kernel staged runs", None),
        ("cupy", "cupy", None),
    ],
)
def test_a_path_is_forced_or_forbidden(machine, choice, live, path):
    check = COPY if path is None else f"fake.calls = fake.batches = 0\n{COPY}assert fake.batches == {int(path == 4)}\n"
    output = land(machine, f"LAND\n{check}", **{landing.CHOICE: choice})
    assert f"live {live}\n" in output


LATE = """
query = cupy.cuda.runtime.eventQuery
cupy.cuda.runtime.eventQuery = lambda event: 600 if fake.batches else query(event)
LAND
cupy.cuda.runtime.eventQuery = query
low, high = pool.address, pool.address + pool.nbytes
(memory,) = [each for each in landing._given_up if each.host.any()][:1]
assert not low <= memory.host.ctypes.data < high, "a copy that was given up can still write to the pool"
"""


def test_a_copy_that_is_given_up_cannot_reach_the_pool(machine):
    assert "batch: a copy of one block was not done" in land(machine, SOON + LATE)


@pytest.mark.parametrize(
    ("release", "reason"),
    [
        ("580.159.04", "driver 580.159.04 is known to hang in it"),
        ("580.159.03", "driver 580.159.03 is known to hang in it"),
        ("580.159", "driver 580.159 is known to hang in it"),
        ("", "the driver's release is unknown, and some hang in it: FASTDEPLOY_KVCACHE_CUDA_PATH=batch tries it"),
    ],
)
def test_batches_are_not_asked_of_a_driver_that_is_unknown_or_of_a_branch_that_hangs(machine, release, reason):
    output = land(machine, f"fake.batch_fault = 2\nLAND\n{COPY}", FAKE_DRIVER_RELEASE=release)
    assert "live kernel staged runs\n" in output
    assert f"batch: {reason}" in output


@pytest.mark.parametrize("release", ["580.159.04", ""])
def test_a_forced_path_is_tried_on_any_driver(machine, release):
    environment = {landing.CHOICE: "batch", "FAKE_DRIVER_RELEASE": release}
    assert "live batch\n" in land(machine, f"LAND\n{COPY}", **environment)
    wrong = land(machine, f"fake.batch_fault = 1\nLAND\n{COPY}", **environment)
    assert "do without the path batch: a block came back with other bytes" in wrong


def test_a_neighbour_of_a_branch_that_hangs_is_another_branch(machine):
    for release in ("580.15.01", "580.160.01", "580.1590.01", "580.65.06"):
        assert "live kernel staged batch runs\n" in land(machine, "LAND\n", FAKE_DRIVER_RELEASE=release)
