"""Networks, and ranks that are closed at the end."""

import pytest

from tests.transfer.network import MemoryNetwork
from tests.transfer.ranks import DecodeRank, PrefillRank


@pytest.fixture
def net(request):
    """In memory, unless a test gives another kind."""
    return getattr(request, "param", MemoryNetwork)()


@pytest.fixture
def ranks(net, request):
    """Makes ranks of one network, which must be idle at the end."""

    def make(kind, **arguments):
        made = kind(net, **arguments)
        request.addfinalizer(made.close)
        return made

    return make


@pytest.fixture
def pair(ranks):
    return ranks(PrefillRank), ranks(DecodeRank)


@pytest.fixture
def world(request, monkeypatch):
    """Data planes of the module's `KIND`, which read each other."""
    made = request.module.KIND(monkeypatch)
    yield made
    made.close()


@pytest.fixture
def mine(world):
    with world.ours() as made:
        yield made
