"""The sockets between an engine with a role and its ranks."""

import tempfile
from functools import partial

import pytest

from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.fastdeploy_integration import settings
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.leases import LeaseOpened
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.rank_channel import EngineEnd, RankEnd, RankNews
from fastdeploy_kvcache_v1.link.place import make_private, socket_path
from fastdeploy_kvcache_v1.transfer.fetch import FetchResult
from fastdeploy_kvcache_v1.transfer.rank_messages import CancelFetch, StartFetch, TransferNews
from tests.link.test_link import wait_for

PORT = 8123
until = partial(wait_for, what="news")


@pytest.fixture
def engine(monkeypatch, tmp_path_factory):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("t")))
    monkeypatch.setenv(settings.SESSION_VARIABLE, "01234567")
    make_private(socket_path(PORT, "copies").parent)
    made = EngineEnd(PORT, 2)
    yield made
    made.close()


def test_every_rank_hears_every_command_in_order_and_is_heard(engine):
    ranks = [RankEnd(PORT, rank) for rank in range(2)]
    until(lambda: engine.send(CancelFetch("early", "")) == [])
    commands = [StartFetch("a", (1, 2), 0, 5), CancelFetch("a", "gone")]
    for command in commands:
        assert engine.send(command) == []
    heard = [[], []]
    for mine, rank in zip(heard, ranks, strict=True):
        until(lambda mine=mine, rank=rank: mine.extend(rank.take()) or mine[-2:] == commands)
    news = TransferNews(fetches=(FetchResult("a", 0, 1.0, (1, 2), "gone"),))
    ranks[1].tell(news)
    said = []
    until(lambda: said.extend(engine.take()) or said)
    assert said == [RankNews(1, news)]
    assert engine.take() == []
    ranks[0].tell(opened := LeaseOpened("transfer of a", "a"))
    until(lambda: said.extend(engine.take()) or len(said) == 2)
    assert said[1] == RankNews(0, opened)
    for rank in ranks:
        rank.close()


def test_ranks_that_are_not_there_are_named(engine):
    assert engine.send(CancelFetch("a", "")) == [0, 1]


def test_sockets_that_cannot_be_made_are_refused(engine):
    with pytest.raises(ConfigError, match=f"the sockets to the workers of queue {PORT + 1} cannot be made"):
        EngineEnd(PORT + 1, 2)  # there is no directory for them
