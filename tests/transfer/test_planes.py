"""Every data plane keeps the contract; test_mooncake_plane.py asks Mooncake itself, `ipc_checks.py` a GPU."""

import atexit
from contextlib import closing

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
    with closing(kind(monkeypatch)) as world:
        check(world)


@pytest.mark.parametrize(("kind", "name"), [(Mooncake, "close"), (CudaIpc, "_close_sources")])
def test_an_interpreter_that_ends_closes_first_what_others_opened(monkeypatch, kind, name):
    world, registered = kind(monkeypatch), []
    monkeypatch.setattr(atexit, "register", registered.append)
    monkeypatch.setattr(atexit, "unregister", registered.remove)
    plane = world.make()
    assert registered == [getattr(plane, name)]
    plane.close()
    assert registered == []
    world.close()
