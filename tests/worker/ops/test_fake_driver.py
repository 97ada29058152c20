"""The Python face of GPU copies on a fake driver, in a process of its own: which stream, which errors, which bytes.

Nothing here shows that CUDA does what its documentation says.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fastdeploy_kvcache_v1.worker import ops
from tests.worker.ops.native import CUSTOM_OPS, ROOT, compile_program, require_core

pytestmark = pytest.mark.process

PROGRAM = """
import dataclasses, sys
from pathlib import Path
import numpy as np
from fastdeploy_kvcache_v1.worker import ops
from fastdeploy_kvcache_v1.errors import CacheStateError, ConfigError, TransferError
from fastdeploy_kvcache_v1.worker.ops import CompiledOps, CopyRun
from fastdeploy_kvcache_v1.worker.ops.library import Library
from tests.worker.ops.faces import Memory, Shape
from tests.worker.ops.fake_cuda import fake_cuda

# A core without the kernel beside it: the CUDA runtime inside that one wants a driver, not a toy.
for key, implementation in ops.compiled_implementations(CompiledOps(Library(Path(sys.argv[1])))).items():
    ops.install(*key, implementation)
live = ops.live()
assert live["swap_cache_per_layer.cuda"] == live["swap_cache_all_layers.cuda"] == "compiled", live

fake = fake_cuda()

memory = Memory.random(Shape(2, (48, 16), 9, 9), np.random.default_rng(4))
device = [tuple(dataclasses.replace(rows, on_gpu=True) for rows in layer) for layer in memory.device_rows]
runs = [CopyRun(0, 4, 3), CopyRun(7, 1, 1), CopyRun(5, 8, 1)]
ops.swap_cache_all_layers(memory.host_rows, device, runs, stream=0x7700)
for run in runs:
    for i in range(run.blocks):
        assert (memory.host[run.target + i, :48] == memory.device[0][0][run.source + i]).all()
        assert (memory.host[run.target + i, 112:] == memory.device[1][1][run.source + i]).all()
ops.swap_cache_per_layer(device[1], memory.host_rows[1], [CopyRun(4, 0, 1)], stream=0x7700)
assert (memory.device[1][0][0] == memory.host[4, 64:112]).all()
assert (fake.last_stream, fake.other_streams) == (0x7700, 0)

copies = fake.copies
for stream, error, text in ((0, CacheStateError, "NULL stream"), (0x7700, ConfigError, "context")):
    fake.has_context = int(stream == 0)
    try:
        ops.swap_cache_per_layer(device[0], memory.host_rows[0], runs, stream=stream)
    except error as caught:
        assert text in str(caught), caught
    else:
        raise AssertionError("not refused")
fake.has_context = 1
assert fake.copies == copies
fake.fail_copy_number = copies + 1
try:
    ops.swap_cache_per_layer(device[0], memory.host_rows[0], runs, stream=0x7700)
except TransferError as caught:
    assert "CUDA error 700" in str(caught)
else:
    raise AssertionError("no error")
both = [tuple(dataclasses.replace(rows, on_gpu=True) for rows in layer) for layer in memory.host_rows]
for wrong, text in (((device[0], both[0]), "two places on the GPU"),
                    ((device[0], (memory.host_rows[0][0], both[0][1])), "one kind of memory")):
    try:
        ops.swap_cache_per_layer(*wrong, runs, stream=0x7700)
    except CacheStateError as caught:
        assert text in str(caught), caught
    else:
        raise AssertionError("not refused")
print("passed")
"""


def test_copies_go_to_the_stream_that_was_named(tmp_path):
    require_core()
    compile_program([CUSTOM_OPS / "tests/fake_libcuda.cc"], tmp_path / "libcuda.so.1", "-fPIC", "-shared")
    core = Path(shutil.copy(ops.COMPILED.library.path, tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(core)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout == "passed\n", done.stderr


LOOK = """
import sys
from pathlib import Path
from fastdeploy_kvcache_v1.worker.ops.library import Library
print(Library(Path(sys.argv[1])).raw.kvswap_cuda_has_path(5))
"""


def test_a_kernel_of_another_build_is_left_alone(tmp_path):
    """Its arguments may look different, and a GPU would read past them."""
    require_core()
    compile_program([CUSTOM_OPS / "tests/fake_libcuda.cc"], tmp_path / "libcuda.so.1", "-fPIC", "-shared")
    header, launch = f'#include "{CUSTOM_OPS}/cuda/kernel.h"', 'extern "C" int kvswap_kernel_launch() { return 0; }'
    abi = 'extern "C" int kvswap_kernel_abi() { return kvswap::cuda::kKernelAbi %s; }'
    seen = []
    for number, lines in enumerate(([launch], [launch, abi % "+ 1"], [launch, abi % ""])):
        directory = tmp_path / str(number)
        directory.mkdir()
        source = directory / "kernel.cc"
        source.write_text("\n".join([header, *lines, ""]))
        compile_program([source], directory / "_core_cuda.so", "-fPIC", "-shared")
        core = Path(shutil.copy(ops.COMPILED.library.path, directory))
        done = subprocess.run(
            [sys.executable, "-c", LOOK, str(core)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "LD_LIBRARY_PATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        seen.append(done.stdout.strip())
    assert seen == ["0", "0", "1"]
