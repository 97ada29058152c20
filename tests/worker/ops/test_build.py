"""What is built: by which sources, with which symbols, and what happens where nothing can be built."""

from __future__ import annotations

import ctypes
import re
import subprocess

import pytest

from fastdeploy_kvcache_v1.worker.ops import paddle_ops
from tests.worker.ops.native import CUSTOM_OPS, build, compiler, run_python


@pytest.mark.process
def test_a_machine_without_compilers_builds_nothing_and_does_not_fail(tmp_path, monkeypatch):
    for variable in ("CC", "CXX", "NVCC"):
        monkeypatch.setenv(variable, "/nowhere/compiler")
    stale = tmp_path / "_copy_rows.so"
    stale.write_bytes(b"of yesterday")
    missing = build.build_what_works({name: tmp_path / file for name, file in build.TARGETS.items()})
    assert set(missing) == set(build.TARGETS)
    assert list(tmp_path.iterdir()) == [], "none is better than a stale one"


def test_parts_to_build_can_be_chosen(monkeypatch):
    monkeypatch.delenv("FASTDEPLOY_KVCACHE_BUILD", raising=False)
    assert build.wanted() == list(build.TARGETS)
    assert build.wanted(["cpu", "ptx"]) == ["cpu", "ptx"], "the text is built where it is named"
    monkeypatch.setenv("FASTDEPLOY_KVCACHE_BUILD", "paddle, cpu")
    assert build.wanted() == ["cpu", "paddle"]
    monkeypatch.setenv("FASTDEPLOY_KVCACHE_BUILD", "none")
    assert build.wanted() == []
    with pytest.raises(build.BuildError, match="cannot build metal"):
        build.wanted(["metal"])


@pytest.mark.process
def test_the_paddle_operators_compile_for_tensors_on_a_gpu(tmp_path):
    """Only compiled: a Paddle without GPUs lacks what they would link to."""
    pytest.importorskip("paddle")
    compiler("NVCC")
    command = build.paddle_compiler(build.paddle_root(), with_gpu=True)
    command += ["-c", str(CUSTOM_OPS / "paddle_ops.cu"), "-o", str(tmp_path / "ops.o")]
    done = subprocess.run([each for each in command if each != "-shared"], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert b"copy_cache_rows" in (tmp_path / "ops.o").read_bytes()


@pytest.mark.process
def test_the_c_copies_are_one_function_and_need_nothing(tmp_path):
    compiler("CC")
    build.build_cpu(tmp_path / "copies.so")
    assert ctypes.CDLL(str(tmp_path / "copies.so")).copy_rows


@pytest.mark.process
def test_the_ptx_is_renewed_as_it_was(tmp_path):
    """By the nvcc that made it; another one may say the same in other words."""
    compiler("NVCC")
    build.build_ptx(tmp_path / "new.ptx")
    new, shipped = (path.read_text() for path in (tmp_path / "new.ptx", build.IN_PACKAGE["ptx"]))
    assert new.splitlines()[0] == shipped.splitlines()[0]
    assert f".version {build.PTX_VERSION}\n" in new
    if re.findall("release .*", new) == re.findall("release .*", shipped):
        assert new == shipped


def test_the_paddle_operators_are_there_where_paddle_is():
    pytest.importorskip("paddle")
    compiler()
    assert paddle_ops.LIBRARY.exists(), "build again: python custom_ops/build.py"
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


@pytest.mark.parametrize(
    ("cuda_version", "nvcc", "chosen"),
    [("12.6", "/x/nvcc", "/x/nvcc"), ("12.6", "", "/x/g++"), ("False", "/x/nvcc", "/x/g++")],
)
def test_operators_are_for_gpus_where_paddle_has_them_and_nvcc_is(tmp_path, monkeypatch, cuda_version, nvcc, chosen):
    (tmp_path / "version").mkdir()
    said = f"full_version     = '3.3.0'\ncommit           = 'abc'\ncuda_version     = '{cuda_version}'\n"
    (tmp_path / "version/__init__.py").write_text(said)
    monkeypatch.setitem(build.COMPILERS, "NVCC", ())
    monkeypatch.setenv("NVCC", nvcc)
    monkeypatch.setenv("CXX", "/x/g++")
    command = build.paddle_compiler(tmp_path)
    assert command[0] == chosen
    assert ("-DPADDLE_WITH_CUDA" in command) == (chosen == "/x/nvcc")
    assert '-DKVCACHE_PADDLE="3.3.0+abc"' in command
