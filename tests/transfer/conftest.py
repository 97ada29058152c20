"""Networks, and ranks that are closed at the end."""

import pytest

from tests.transfer.network import MemoryNetwork
from tests.transfer.ranks import DecodeRank, PrefillRank


class Ranks:
    """Makes ranks of one network, which must be idle at the end."""

    def __init__(self, net):
        self.net, self.made = net, []

    def __call__(self, kind, **arguments):
        self.made.append(kind(self.net, **arguments))
        return self.made[-1]


@pytest.fixture
def net(request):
    """In memory, unless a test gives another kind."""
    return getattr(request, "param", MemoryNetwork)()


@pytest.fixture
def ranks(net):
    made = Ranks(net)
    yield made
    for each in made.made:
        each.close()


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
