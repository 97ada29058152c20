"""A prefill and a decode runner with the real model and real sockets between them; their engines are a few tasks."""

import time
from pathlib import Path

import pytest

from fastdeploy_kvcache_v1.fastdeploy_integration.cpu_worker.batch_rows import FAILED
from fastdeploy_kvcache_v1.fastdeploy_integration.cpu_worker.random_model import write_random_model
from fastdeploy_kvcache_v1.fastdeploy_integration.cpu_worker.runner import CpuModelRunner, RunnerConfig
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.decode_rank import DecodeRank
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.leases import LeaseOpened, Leases
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.prefill_rank import PrefillRank
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.settings import RankPlace, TransferChoice
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.transfer_name import KEY
from fastdeploy_kvcache_v1.metadata import SwapStep
from fastdeploy_kvcache_v1.swap_message import encode
from fastdeploy_kvcache_v1.transfer.ledger import TransferTotals
from fastdeploy_kvcache_v1.transfer.offer_desk import LeaseEnd
from fastdeploy_kvcache_v1.transfer.rank_messages import CancelFetch, StartFetch, TransferNews
from fastdeploy_kvcache_v1.transfer.role_info import RankInfo
from fastdeploy_kvcache_v1.transfer.settings import TransferSettings
from tests.fastdeploy_integration.cpu_worker.host_tasks import ABORT, PREEMPTED, other, prefill
from tests.fastdeploy_integration.cpu_worker.test_runner import BLOCK, PROMPT, Messages, decode_alone, with_swaps
from tests.transfer.peer import HOST, SECRET

SWAPS = "_kvcache_v1_swaps"


class Channel:
    """The engine's end of a rank."""

    def __init__(self):
        self.commands, self.news, self.info = [], [], None
        self.leases = Leases(num_ranks=1, send=self.commands.append)
        self.told, self._request_ids = [], {}

    def take(self):
        commands, self.commands[:] = list(self.commands), []
        return commands

    def tell(self, news):
        if isinstance(news, RankInfo):
            self.info = news
        elif isinstance(news, TransferNews):
            self.news += news.fetches
        else:
            self.leases.heard(0, news)
            if isinstance(news, LeaseOpened):
                self._request_ids[news.lease] = news.request_id
            elif isinstance(news, LeaseEnd):
                self.told.append((self._request_ids.pop(news.lease), news.error))


class Pair:
    def __init__(self, model, directory, port=0, **limits):
        settings = TransferSettings(secret=SECRET, ping_s=0.1, **limits)
        choice, place = TransferChoice(settings, "socket", True), RankPlace(HOST, (port,), "the model")
        self.offers, self.channel = Channel(), Channel()
        self.told, self.leases = self.offers.told, self.offers.leases
        self.roles = PrefillRank(choice, place, self.offers), DecodeRank(choice, place, self.channel)
        self.prefill, self.decode = (self._runner(model, directory / str(i), role) for i, role in enumerate(self.roles))

    def _runner(self, model, directory, role):
        directory.mkdir()
        num_host_blocks = 4 if isinstance(role, PrefillRank) else 0
        config = RunnerConfig(Path(model), BLOCK, num_host_blocks, cache_dtype="float32")
        runner = CpuModelRunner(config, Messages(), stats_directory=directory, transfers=role)
        runner.load_weights()
        runner.create_caches(16)
        runner.messages = runner._sender.sent
        return runner

    def prefill_task(self, name="a", prompt=PROMPT, blocks=(5, 9, 2, 7), row=0, transfer=None, **chunk):
        task = prefill(row, name, prompt, blocks, **chunk)
        task.ic_req_data = {KEY: transfer or f"transfer of {name}"}
        task.need_prefill_tokens = len(prompt)
        task.disaggregate_info = {"decode_ip": HOST, "decode_rdma_ports": [self.roles[1].transfers.port]}
        return task

    def fetch(self, slots, name="a", after_step=-1):
        self.channel.commands.append(StartFetch(f"transfer of {name}", tuple(slots), 0, after_step))

    def turn(self):
        for runner in (self.prefill, self.decode):
            runner.not_need_stop()
        for role in self.roles:
            if role.is_in_use:
                role.transfers.check()

    def until(self, condition):
        deadline = time.monotonic() + 30
        while not condition():
            self.turn()
            assert time.monotonic() < deadline, (self.told, self.channel.news)
            time.sleep(0.002)

    def settled(self):
        self.until(lambda: self.told and self.channel.news)
        return self.told[-1], self.channel.news[-1].error

    def check_idle(self):
        for role in self.roles:
            role.transfers.check_idle()

    def close(self):
        for runner in (self.prefill, self.decode):
            runner.drop_caches()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_random_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model):
    return decode_alone(model, PROMPT, 6)


@pytest.fixture
def pair(model, tmp_path):
    made = Pair(model, tmp_path)
    yield made
    made.close()


def tokens_of(runner, steps):
    first = len(runner.messages)
    for _ in range(steps):
        runner.execute(1)
    return [message[0][0] for message in runner.messages[first:]]


def continued(pair, first, blocks):
    pair.decode.insert_tasks([prefill(0, "a", PROMPT, blocks, start=len(PROMPT), outputs=[first])])
    return tokens_of(pair.decode, 5)


@pytest.mark.parametrize("chunks", [[21], [8, 21], [5, 13, 21]])
def test_tokens_are_those_of_one_server(pair, expected, chunks):
    pair.fetch([3, 1, 8])
    first = []
    for start, end in zip([0, *chunks], chunks, strict=False):
        pair.prefill.insert_tasks([pair.prefill_task(start=start, end=end)])
        first = tokens_of(pair.prefill, 1)
        pair.turn()
    assert first == expected[:1]
    assert not pair.prefill._table.has_work, "the sequence goes on elsewhere"
    assert pair.settled() == (("a", None), None)
    pair.check_idle()
    assert pair.leases.take_ended() == [["a", "finished"]]
    assert pair.leases.ledger.totals == TransferTotals(started=1, arrived=1)
    assert continued(pair, first[0], [3, 1, 8, 11]) == expected[1:]


def test_blocks_that_come_back_from_the_host_tier_are_offered_as_any_other(pair, expected):
    ended = pair.prefill_task("ended", blocks=(5, 9, 2))
    ended.disaggregate_info = None
    pair.prefill.insert_tasks([ended])
    tokens_of(pair.prefill, 1)
    away = with_swaps(other(ABORT, 0, "ended"), 0, evict=((5, 9), (2, 0)))
    pair.prefill.insert_tasks([away])
    passing = pair.prefill_task("passing", prompt=[40] * 16, blocks=(5, 9))  # over what was copied out
    passing.disaggregate_info = None
    pair.prefill.insert_tasks([passing])
    tokens_of(pair.prefill, 1)
    pair.fetch([3, 1, 8])
    back = pair.prefill_task(blocks=(7, 4, 6), start=16)
    pair.prefill.insert_tasks([with_swaps(back, 1, swap_in=((2, 0), (7, 4)), previous=0)])
    first = tokens_of(pair.prefill, 1)
    assert first == expected[:1]
    assert pair.settled() == (("a", None), None)
    assert continued(pair, first[0], [3, 1, 8, 11]) == expected[1:]


def test_a_stop_sequence_that_ends_with_the_first_token_ends_the_sequence(pair, expected):
    stop = {"stop_token_ids": [[expected[0]]], "stop_seqs_len": [1], "min_tokens": 0}
    pair.decode.insert_tasks([prefill(0, "a", PROMPT, range(4), start=21, outputs=expected[:1], **stop)])
    assert tokens_of(pair.decode, 1) == [1]
    assert not pair.decode._table.has_work


def test_a_fetch_waits_for_the_batch_that_ends_what_writes_its_blocks(pair, expected):
    """The row of a preempted request still computes when its blocks are given to another."""
    pair.decode.insert_tasks([prefill(0, "old", list(range(60, 80)), [3, 1, 8])])
    tokens_of(pair.decode, 1)
    pair.fetch([3, 1, 8], after_step=0)
    pair.prefill.insert_tasks([pair.prefill_task()])
    first = tokens_of(pair.prefill, 1)
    pair.until(lambda: pair.roles[1].transfers._fetches.num_offers)
    tokens_of(pair.decode, 2)  # "old" goes on
    assert pair.channel.news == []
    preempt = other(PREEMPTED, 0, "old")
    setattr(preempt, SWAPS, encode(SwapStep(0), -1))
    pair.decode.insert_tasks([preempt])
    pair.turn()
    assert pair.channel.news == [], "its copies have not been submitted"
    tokens_of(pair.decode, 1)
    assert pair.settled() == (("a", None), None)
    assert continued(pair, first[0], [3, 1, 8, 11]) == expected[1:]


def test_a_cancelled_fetch_writes_nothing_and_the_next_owner_is_right(pair, expected):
    pair.fetch([3, 1, 8])
    pair.prefill.insert_tasks([pair.prefill_task()])
    pair.channel.commands.append(CancelFetch("transfer of a", "the client left"))
    pair.decode.not_need_stop()
    pair.decode.insert_tasks([prefill(0, "b", PROMPT, [3, 1, 8, 4])])
    assert tokens_of(pair.decode, 3) == expected[:3]
    tokens_of(pair.prefill, 1)
    assert pair.settled() == (("a", "the client left"), "the client left")
    assert tokens_of(pair.decode, 3) == expected[3:]
    pair.check_idle()


@pytest.mark.parametrize(
    ("again", "reason"),
    [
        ({"blocks": (5, 9, 3, 7)}, "it was given other blocks"),
        ({"name": "b", "row": 1, "blocks": (1, 9, 3, 4)}, "its blocks were given to another request"),
        ({"transfer": "another"}, "another request has its id|given to another request"),
    ],
)
def test_a_lease_ends_before_its_blocks_hold_anything_else(pair, again, reason):
    """FastDeploy computes a request again after a lost batch, and ids come again."""
    pair.fetch([3, 1, 8])
    pair.prefill.insert_tasks([pair.prefill_task(start=0, end=8)])
    tokens_of(pair.prefill, 1)
    pair.prefill.insert_tasks([pair.prefill_task(**{"start": 0, "end": 8, **again})])
    (name, error), fetch_error = pair.settled()
    assert name == "a"
    assert pair.leases.ledger.totals.cancelled == 1
    assert pair.leases.take_ended()[0] == ["a", f"error: {error}"]
    assert any(each in error for each in reason.split("|"))
    assert "withdrew" in fetch_error


def test_a_request_that_cannot_be_computed_fails_its_transfer(pair, monkeypatch):
    pair.fetch([3, 1, 8])

    def broken(*arguments):
        raise RuntimeError("no pass")

    monkeypatch.setattr(pair.prefill._steps, "_forward", broken)
    pair.prefill.insert_tasks([pair.prefill_task()])
    assert tokens_of(pair.prefill, 1) == [FAILED]
    (_, error), fetch_error = pair.settled()
    assert "no pass" in error
    assert "no pass" in fetch_error


def test_a_later_chunk_of_an_ended_transfer_offers_nothing(pair):
    pair.prefill.insert_tasks([pair.prefill_task(start=0, end=8)])
    pair.roles[0].failed("a", "given up")
    tokens_of(pair.prefill, 1)
    pair.prefill.insert_tasks([pair.prefill_task(start=8)])
    tokens_of(pair.prefill, 1)
    pair.turn()
    assert pair.told == [("a", "given up")]
    pair.roles[0].transfers.check_idle()


def test_a_decode_server_without_ranks_is_refused(pair):
    task = pair.prefill_task()
    task.disaggregate_info["decode_rdma_ports"] = []
    pair.prefill.insert_tasks([task])
    assert pair.told == [("a", "lease 'transfer of a' is offered to no rank of a decode server")]


def test_a_rank_tells_where_it_listens_and_what_its_blocks_are(pair):
    for role, channel in zip(pair.roles, (pair.offers, pair.channel), strict=True):
        transfers, geometry = role.transfers, channel.info.geometry
        assert (channel.info.port, channel.info.plane_address) == (transfers.port, transfers.plane_address)
        assert (geometry.model, geometry.block_size, geometry.tp_size, geometry.tp_rank) == ("the model", BLOCK, 1, 0)


def test_a_request_without_a_decode_server_is_computed_and_not_offered(pair, expected):
    task = pair.prefill_task()
    task.disaggregate_info = None
    pair.prefill.insert_tasks([task])
    assert tokens_of(pair.prefill, 1) == expected[:1]
    pair.turn()
    assert pair.told == []
