"""Which copies and which device a test runs on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from fastdeploy_kvcache_v1.worker import ops
from tests.gpu.stand_in.in_process import PythonDriver, cupy_in_process
from tests.worker.ops.native import require_core
from tests.worker.worker_fakes import Rig


@pytest.fixture
def rig() -> Iterator[Rig]:
    """Device slot N holds 10 + N, host slots hold zeros. Streams move when something waits for them."""
    rig = Rig()
    rig.fill()
    yield rig
    rig.close()


@contextlib.contextmanager
def installed(platform: str, table: dict[tuple[str, str], ops.Implementation]) -> Iterator[None]:
    """The implementations of `table` answer on `platform`."""
    previous = [(*key, ops.install(*key, table[key])) for key in ops.TWINS if key[1] == platform]
    yield
    for entry in previous:
        ops.install(*entry)


@pytest.fixture(params=["numpy", "compiled"])
def cpu_ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The implementation behind every CPU op and CPU stream of this test."""
    if request.param == "compiled":
        table = ops.compiled_implementations(require_core())
    else:
        monkeypatch.setattr(ops, "COMPILED", None)
        table = ops.TWINS
    with installed("cpu", table):
        yield request.param


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[PythonDriver]:
    """A GPU in this process, on which nothing has landed. CuPy copies, also where a driver is."""
    monkeypatch.setattr(ops, "_landed", None)
    monkeypatch.setattr(ops, "COMPILED", None)
    with installed("cuda", ops.TWINS), cupy_in_process() as driver:
        yield driver
