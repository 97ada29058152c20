"""Every data plane keeps the contract; test_mooncake_plane.py asks Mooncake itself, `ipc_checks.py` a GPU."""

import pytest

from tests.gpu import plane_contract
from tests.transfer.planes import CudaIpc, Mooncake, Sockets

CHECKS = [
    (kind, check)
    for kind, checks in (
        (Sockets, plane_contract.EVERY_PLANE),
        (Mooncake, plane_contract.ONE_SIDED),
        (CudaIpc, plane_contract.CUDA_IPC),
    )
    for check in checks
]


@pytest.mark.parametrize(("kind", "check"), CHECKS, ids=[f"{kind.__name__} {check.__name__}" for kind, check in CHECKS])
def test_the_contract_is_kept(monkeypatch, kind, check):
    world = kind(monkeypatch)
    try:
        check(world)
    finally:
        world.close()
