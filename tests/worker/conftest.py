"""Runs the tests that ask for it once with the NumPy twins and once with the compiled core."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from fastdeploy_kvcache_v1.worker import ops
from tests.worker.ops.native import require_core

with contextlib.suppress(ImportError):
    import paddle  # noqa: F401  its first import starts a process, which no test may


@pytest.fixture(params=["numpy", "compiled"])
def cpu_ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The implementation behind every CPU op and CPU stream of this test."""
    if request.param == "compiled":
        table = ops.compiled_implementations(require_core())
    else:
        monkeypatch.setattr(ops, "COMPILED", None)
        table = ops.TWINS
    previous = [(*key, ops.install(*key, table[key])) for key in ops.TWINS if key[1] == "cpu"]
    yield request.param
    for entry in previous:
        ops.install(*entry)


@pytest.fixture
def cupy_ops() -> Iterator[None]:
    """CuPy behind every CUDA op, also where a driver is: these tests play the GPU themselves."""
    previous = [(*key, ops.install(*key, ops.TWINS[key])) for key in ops.TWINS if key[1] == "cuda"]
    yield
    for entry in previous:
        ops.install(*entry)
