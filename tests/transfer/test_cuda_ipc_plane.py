"""CudaIpcPlane between two processes over the fake GPU, and what it says where there is none.

The checks are those of `scripts/test-gpu` (tests/gpu/ipc_checks.py), and some that only a fake can be made to do.
Nothing here shows that CUDA does what its documentation says.
"""

from __future__ import annotations

import pytest

from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.transfer.cuda_ipc_plane import CudaIpcPlane
from fastdeploy_kvcache_v1.worker import ops
from tests.gpu.built import run


@pytest.mark.process
@pytest.mark.parametrize(("script", "checks"), [("ipc_checks.py", 14), ("ipc_fake_checks.py", 10), ("ipc_desks.py", 3)])
def test_two_processes_on_one_gpu(script, checks):
    done = run(script)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok  ") == checks


def test_without_a_gpu_it_is_refused_in_one_line(monkeypatch):
    if ops.COMPILED is not None and ops.COMPILED.library.raw.kvswap_cuda_available() != 0:
        with pytest.raises(ConfigError, match=r"^cuda_ipc needs a GPU: there is no CUDA driver"):
            CudaIpcPlane()
    monkeypatch.setattr(ops, "COMPILED", None)
    with pytest.raises(ConfigError, match="scripts/build_ops"):
        CudaIpcPlane()
