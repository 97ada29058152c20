"""Ranks, planes and peers with real sockets, which are closed at the end."""

from contextlib import contextmanager

import pytest

from tests.transfer.peer import Peer
from tests.transfer.ranks import DecodeRank, PrefillRank
from tests.transfer.reader import EVERYTHING, Ours


@pytest.fixture
def ranks():
    """Makes ranks, which must be idle at the end."""
    made = []

    def make(kind, **arguments):
        made.append(kind(**arguments))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def pair(ranks):
    return ranks(PrefillRank), ranks(DecodeRank)


@contextmanager
def granted_peer():
    """All of its blocks may be read."""
    peer = Peer()
    peer.ask("grant", "all", EVERYTHING)
    yield peer
    peer.kill()


@pytest.fixture(scope="module")
def shared_peer():
    with granted_peer() as peer:
        yield peer


@pytest.fixture
def own_peer():
    with granted_peer() as peer:
        yield peer


@pytest.fixture
def ours():
    made = Ours()
    yield made
    made.plane.close()
