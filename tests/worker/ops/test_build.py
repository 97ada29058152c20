"""What is built: by which sources, with which symbols, and what happens where nothing can be built."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess

import pytest

from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.worker import ops
from fastdeploy_kvcache_v1.worker.ops import library, paddle_ops
from tests.worker.ops.native import CUSTOM_OPS, build, c_compiler, compiler, cuda_compiler, run_python

BUILD_AGAIN = "build again: python custom_ops/build.py"


def test_the_core_is_live_where_there_is_a_compiler_and_built_from_these_sources():
    compiler()
    if os.environ.get(library.CHOICE) == "numpy":
        pytest.skip(f"{library.CHOICE}=numpy")
    assert ops.COMPILED is not None, BUILD_AGAIN
    assert ops.COMPILED.library.sources == build.source_digest(), BUILD_AGAIN
    assert ops.live()["swap_cache_per_layer.cpu"] == ops.live()["swap_cache_all_layers.cpu"] == "compiled"


@pytest.mark.process
def test_without_a_core_numpy_copies_and_a_server_says_so_when_it_has_started():
    """An error of a start is one line, behind nothing."""
    code = (
        "import sys; from fastdeploy_kvcache_v1.worker import ops; print(ops.live());"
        "print('started', file=sys.stderr); ops.warn_of_slow_copies()"
    )
    done = run_python(code, **{library.CHOICE: "numpy"})
    assert done.returncode == 0, done.stderr
    assert "'swap_cache_per_layer.cpu': 'numpy'" in done.stdout
    assert done.stderr.startswith("started\n")
    assert done.stderr.count("NumPy copies instead") == 1


@pytest.mark.process
def test_a_library_that_does_not_fit_is_refused(tmp_path):
    source = tmp_path / "old.cc"
    source.write_text('extern "C" int kvswap_abi(void) { return 999; }\n')
    subprocess.run([*compiler(), "-shared", "-fPIC", str(source), "-o", str(tmp_path / "old.so")], check=True)
    with pytest.raises(ConfigError, match=r"old\.so has ABI version 999, this package needs"):
        library.Library(tmp_path / "old.so")
    source.write_text('extern "C" int something_else(void) { return 1; }\n')
    subprocess.run([*compiler(), "-shared", "-fPIC", str(source), "-o", str(tmp_path / "other.so")], check=True)
    with pytest.raises(ConfigError, match="not the core of this package"):
        library.Library(tmp_path / "other.so")
    with pytest.raises(OSError, match="nothing here"):
        library.Library(tmp_path / "nothing here.so")


@pytest.mark.process
def test_a_machine_without_compilers_builds_nothing_and_does_not_fail(tmp_path, monkeypatch):
    for variable in ("CC", "CXX", "NVCC"):
        monkeypatch.setenv(variable, "/nowhere/compiler")
    monkeypatch.setattr(build, "nvcc", lambda: "/nowhere/nvcc")
    stale = tmp_path / "_core.so"
    stale.write_bytes(b"of yesterday")
    missing = build.build_what_works(tmp_path, list(build.TARGETS))
    assert set(missing) == set(build.TARGETS)
    assert list(tmp_path.iterdir()) == [], "none is better than a stale one"


def test_what_to_build_can_be_chosen(monkeypatch):
    monkeypatch.delenv("FASTDEPLOY_KVCACHE_BUILD", raising=False)
    assert build.wanted() == list(build.TARGETS)
    assert build.wanted(["cuda", "ptx"]) == ["cuda", "ptx"], "the text is built where it is named"
    monkeypatch.setenv("FASTDEPLOY_KVCACHE_BUILD", "paddle, core")
    assert build.wanted() == ["paddle", "core"]
    monkeypatch.setenv("FASTDEPLOY_KVCACHE_BUILD", "none")
    assert build.wanted() == []
    with pytest.raises(build.BuildError, match="cannot build metal"):
        build.wanted(["metal"])


@pytest.mark.process
def test_the_cuda_part_compiles_and_links_for_sm_80_and_sm_90(tmp_path):
    nvcc = cuda_compiler()
    built = build.build_cuda(tmp_path, archs="80,90")
    kernel = ctypes.CDLL(str(built))
    assert kernel.kvswap_kernel_launch, "it loads without a driver: the CUDA runtime is inside"
    assert f"kKernelAbi = {kernel.kvswap_kernel_abi()};" in (CUSTOM_OPS / "cuda/kernel.h").read_text()
    types = [nvcc, "-std=c++17", "-c", str(CUSTOM_OPS / "tests/driver_types_test.cc"), "-o", str(tmp_path / "types.o")]
    done = subprocess.run(types, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert b"copy_kernel" in built.read_bytes()
    cuobjdump = shutil.which("cuobjdump") or shutil.which("/usr/local/cuda/bin/cuobjdump")
    if cuobjdump:
        listed = subprocess.run([cuobjdump, "-lelf", str(built)], capture_output=True, text=True, check=True)
        assert all(arch in listed.stdout for arch in ("sm_80", "sm_90"))


@pytest.mark.process
def test_the_paddle_operators_compile_for_tensors_on_a_gpu(tmp_path):
    """Only compiled: a Paddle without GPUs lacks what they would link to."""
    pytest.importorskip("paddle")
    cuda_compiler()
    command = build.paddle_compiler(build.paddle_root(), with_gpu=True)
    command += ["-c", str(CUSTOM_OPS / "paddle_ops.cu"), "-o", str(tmp_path / "ops.o")]
    done = subprocess.run([each for each in command if each != "-shared"], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert b"copy_cache_rows" in (tmp_path / "ops.o").read_bytes()


@pytest.mark.process
def test_the_c_copies_are_one_function_and_need_nothing(tmp_path):
    c_compiler()
    build.build_cpu(tmp_path / "copies.so")
    assert ctypes.CDLL(str(tmp_path / "copies.so")).copy_rows


@pytest.mark.process
def test_the_ptx_is_renewed_as_it_was(tmp_path):
    """By the nvcc that made it; another one may say the same in other words."""
    cuda_compiler()
    build.build_ptx(tmp_path / "new.ptx")
    new, shipped = (path.read_text() for path in (tmp_path / "new.ptx", build.PACKAGE_OPS / build.FILES["ptx"]))
    assert new.splitlines()[0] == shipped.splitlines()[0]
    assert f".version {build.PTX_VERSION}\n" in new
    if re.findall("release .*", new) == re.findall("release .*", shipped):
        assert new == shipped


def test_the_paddle_operators_are_there_where_paddle_is():
    pytest.importorskip("paddle")
    compiler()
    assert paddle_ops.LIBRARY.exists(), BUILD_AGAIN
    paddle_ops.load()
    paddle_ops.load()


@pytest.mark.process
def test_operators_of_another_package_are_not_registered_twice():
    pytest.importorskip("paddle")
    if not paddle_ops.LIBRARY.exists():
        pytest.skip("the Paddle operators are not built: scripts/build_ops.sh")
    done = run_python(
        "import warnings; warnings.simplefilter('ignore')\n"
        "import paddle\n"
        "from fastdeploy_kvcache_v1.worker.ops import paddle_ops\n"
        "paddle.base.core.load_op_meta_info_and_register_op(str(paddle_ops.LIBRARY))\n"
        "try:\n"
        "    paddle_ops.load()\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    assert done.stdout.startswith(
        "ConfigError another package has registered Paddle operators named swap_cache_per_layer,"
    ), done.stderr
