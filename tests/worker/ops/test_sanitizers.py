"""The C++ core under the address, undefined-behaviour and thread sanitizers, and its CUDA host logic on a fake driver.

The test programs are custom_ops/tests/*_test.cc. Nothing here runs on a GPU.
"""

from __future__ import annotations

import pytest

from tests.worker.ops.native import CUSTOM_OPS, build, compile_program, run_program

pytestmark = pytest.mark.process

TESTS = CUSTOM_OPS / "tests"
ADDRESS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@pytest.fixture(scope="module")
def fake_driver(tmp_path_factory):
    """The directory of a `libcuda.so.1` that copies host memory."""
    directory = tmp_path_factory.mktemp("fake_driver")
    compile_program([TESTS / "fake_libcuda.cc"], directory / "libcuda.so.1", "-fPIC", "-shared")
    return directory


@pytest.fixture(scope="module")
def address_core(tmp_path_factory):
    """The core's objects under the address sanitizer, which four programs are linked with."""
    directory = tmp_path_factory.mktemp("core")
    objects = [directory / f"{number}_{source.stem}.o" for number, source in enumerate(build.core_sources())]
    for source, made in zip(build.core_sources(), objects, strict=True):
        compile_program([source], made, "-c", *ADDRESS)
    return objects


def test_the_core_has_no_data_race(tmp_path):
    program = compile_program([*build.core_sources(), TESTS / "core_test.cc"], tmp_path / "core", "-fsanitize=thread")
    assert run_program(program) == "core: all passed\n"


def test_the_core_is_clean(tmp_path, address_core):
    program = compile_program([*address_core, TESTS / "core_test.cc"], tmp_path / "core_test", *ADDRESS)
    assert run_program(program) == "core: all passed\n"


@pytest.mark.parametrize("test", ["cuda", "paths", "ranges"])
def test_the_cuda_host_logic_is_clean(tmp_path, fake_driver, address_core, test):
    program = compile_program([*address_core, TESTS / f"{test}_test.cc"], tmp_path / test, *ADDRESS)
    for driver in ("new", "old"):
        output = run_program(program, driver, LD_LIBRARY_PATH=str(fake_driver))
        assert output.endswith("all passed\n")
