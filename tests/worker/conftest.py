"""Which copies and which device a test runs on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fastdeploy_kvcache_v1.worker.ops import copies
from tests.gpu.in_process import fake_gpu
from tests.worker.worker_fakes import Rig


@pytest.fixture
def rig() -> Iterator[Rig]:
    """Device slot N holds 10 + N, host slots hold zeros. Streams move when something waits for them."""
    rig = Rig()
    rig.fill()
    yield rig
    rig.close()


@pytest.fixture(params=["numpy", "c"])
def cpu_ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What copies on a CPU in this test."""
    if request.param == "numpy":
        monkeypatch.setattr(copies, "library", lambda: None)
    elif copies.library() is None:
        pytest.skip("the C copies are not built: sudo apt-get install gcc, then scripts/build_ops.sh")
    return request.param


@pytest.fixture
def gpu() -> Iterator[Any]:
    """A GPU in this process."""
    with fake_gpu() as made:
        yield made
