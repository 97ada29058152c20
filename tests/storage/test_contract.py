"""What `StorageBackend` promises, held to by every store of ours."""

import pytest

from fastdeploy_kvcache_v1.storage.conformance import *  # noqa: F403
from tests.mooncake_master import needs_mooncake
from tests.storage.values import namespace, register

REAL_MOONCAKE = pytest.param("mooncake", marks=[pytest.mark.process, needs_mooncake()])


@pytest.fixture(params=["file", "mooncake stand-in", REAL_MOONCAKE])
def open_store(request, connecting):
    """Opens backends of one store, each with registered memory in `slots`, closed at the end, and again."""
    connect = connecting(request.param)

    def open_one(**changes):
        backend = connect(namespace(**changes))
        request.addfinalizer(lambda: (backend.close(), backend.close()))
        register(backend, 16)
        return backend

    return open_one
