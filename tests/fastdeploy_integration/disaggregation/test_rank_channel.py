"""The sockets between a decode engine and its ranks, and the messager's threads at prefill."""

import tempfile
import threading
import time

import pytest

from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.fastdeploy_integration import storage_channel
from fastdeploy_kvcache_v1.fastdeploy_integration.copy_report import socket_path
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.messager import Messager
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.rank_channel import (
    EngineEnd,
    LeaseCounts,
    RankEnd,
    RankNews,
)
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.copy_reports import make_private
from fastdeploy_kvcache_v1.transfer.fetch import FetchResult
from fastdeploy_kvcache_v1.transfer.ledger import TransferTotals
from fastdeploy_kvcache_v1.transfer.rank_messages import CancelFetch, StartFetch, TransferNews

PORT = 8123


def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)


@pytest.fixture
def engine(monkeypatch, tmp_path_factory):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("t")))
    monkeypatch.setenv(storage_channel.SESSION_VARIABLE, "01234567")
    make_private(socket_path(PORT).parent)
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
    ranks[0].tell(counts := LeaseCounts(2, TransferTotals(started=5)))
    until(lambda: said.extend(engine.take()) or len(said) == 2)
    assert said[1] == RankNews(0, counts)
    for rank in ranks:
        rank.close()


def test_ranks_that_are_not_there_are_named(engine):
    assert engine.send(CancelFetch("a", "")) == [0, 1]


def test_sockets_that_cannot_be_made_are_refused(engine):
    with pytest.raises(ConfigError, match=f"the sockets to the workers of queue {PORT + 1} cannot be made"):
        EngineEnd(PORT + 1, 2)  # there is no directory for them


class Queue:
    """FastDeploy's EngineWorkerQueue, which breaks once."""

    def __init__(self, infos):
        self.infos, self.finished, self.acknowledged, self.taken = infos, [], [], threading.Semaphore(0)
        self.is_broken = True

    def get_cache_info(self):
        infos, self.infos = self.infos, []
        return infos

    def put_finished_add_cache_task_req(self, names):
        self.acknowledged += names

    def put_finished_req(self, results):
        self.taken.acquire()  # FastDeploy waits until the last one was read
        self.finished += results


@pytest.mark.parametrize("acknowledges", [True, False])
def test_the_engine_is_told_how_transfers_went_while_the_messager_reads_on(acknowledges):
    queue = Queue([{"request_id": "a", "src_block_ids": [1]}, {"request_id": "a", "dest_block_ids": [2]}])
    messager = Messager(queue, acknowledges=acknowledges)
    messager.tell("a", None)
    messager.tell("b", "the peer died")
    until(lambda: not queue.infos)
    queue.infos = [{"request_id": "c", "src_block_ids": [1]}]
    until(lambda: not queue.infos)
    until(lambda: queue.acknowledged == (["a", "c"] if acknowledges else []))
    assert queue.finished == []
    queue.taken.release(2)
    until(lambda: queue.finished == [["a", "finished"], ["b", "error: the peer died"]])
