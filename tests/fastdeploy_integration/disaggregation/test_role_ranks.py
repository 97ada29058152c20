"""Prefill and decode runners of several ranks with the real model and real sockets: each rank ends when it does."""

import time
from copy import deepcopy
from pathlib import Path

import pytest

from fastdeploy_kvcache_v1.fastdeploy_integration.cpu_worker.runner import CpuModelRunner, RunnerConfig
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.decode_rank import DecodeRank
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.leases import Leases
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.prefill_rank import PrefillRank
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.settings import RankPlace, TransferChoice
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.transfer_name import KEY
from fastdeploy_kvcache_v1.transfer.ledger import TransferTotals
from fastdeploy_kvcache_v1.transfer.rank_messages import CancelFetch, StartFetch, TransferNews
from fastdeploy_kvcache_v1.transfer.role_info import RankInfo
from fastdeploy_kvcache_v1.transfer.settings import TransferSettings
from tests.embedded.engine.family_engine import rank_group
from tests.fastdeploy_integration.cpu_worker.host_tasks import ABORT, other, prefill
from tests.fastdeploy_integration.cpu_worker.test_runner import BLOCK, PROMPT, Messages, decode_alone
from tests.model.test_ranks import on_all
from tests.transfer.peer import HOST, SECRET

from .test_role_runners import model

__all__ = ["model"]

OTHER = list(range(60, 60 + 13))


class Channel:
    """The engine's end of a rank."""

    def __init__(self, rank, hear):
        self.rank, self.hear = rank, hear
        self.commands, self.info = [], None

    def take(self):
        commands, self.commands[:] = list(self.commands), []
        return commands

    def tell(self, news):
        if isinstance(news, RankInfo):
            self.info = news
        else:
            self.hear.append((self.rank, news))


class Server:
    """All ranks of one role, each step at the same time."""

    def __init__(self, model, directory, role, size):
        settings = TransferSettings(secret=SECRET, ping_s=0.1)
        choice, place = TransferChoice(settings, "socket", True), RankPlace(HOST, (0,) * size, "the model")
        self.ranks, self.sender, self.heard = rank_group(size), Messages(), []
        self.channels = [Channel(rank, self.heard) for rank in range(size)]
        self.roles = [role(choice, place, channel) for channel in self.channels]
        config = RunnerConfig(Path(model), BLOCK, num_host_blocks=0, cache_dtype="float32")
        directory.mkdir()
        self.runners = [
            CpuModelRunner(
                config, self.sender if rank.rank == 0 else None, stats_directory=directory, ranks=rank, transfers=each
            )
            for rank, each in zip(self.ranks, self.roles, strict=True)
        ]
        self.each(lambda runner: runner.load_weights())
        self.each(lambda runner: runner.create_caches(16))
        self.is_gone = False

    def each(self, action):
        for outcome in on_all(self.runners, action):
            if isinstance(outcome, Exception):
                raise outcome

    def insert(self, task):
        self.each(lambda runner: runner.insert_tasks([deepcopy(task)]))

    def tokens(self, steps, rows=1):
        first = len(self.sender.sent)
        for _ in range(steps):
            self.each(lambda runner: runner.execute(rows))
        return [message[0][rows - 1] for message in self.sender.sent[first:]]

    def turn(self):
        if not self.is_gone:
            self.each(lambda runner: runner.not_need_stop())

    def send(self, command, *ranks):
        for rank in ranks or range(len(self.channels)):
            self.channels[rank].commands.append(command)

    def close(self):
        for role in self.roles:
            role.transfers.close()
        for runner in self.runners:
            runner.drop_caches()
        for rank in self.ranks:
            rank.close() if len(self.ranks) > 1 else None


class Servers:
    def __init__(self, model, directory, prefill_size, decode_size):
        self.prefill = Server(model, directory / "prefill", PrefillRank, prefill_size)
        self.decode = Server(model, directory / "decode", DecodeRank, decode_size)
        self.leases = Leases(num_ranks=prefill_size, send=self.prefill.send)
        self.ended, self.fetched = [], {}
        """As FastDeploy hears of it; errors by name and rank."""

    def turn(self):
        self.prefill.turn()
        self.decode.turn()
        while self.prefill.heard:
            self.leases.heard(*self.prefill.heard.pop(0))
        self.leases.check()
        self.ended += self.leases.take_ended()
        for rank, news in self.decode.heard:
            assert isinstance(news, TransferNews)
            for result in news.fetches:
                self.fetched[result.request_id, rank] = result.error
        self.decode.heard.clear()

    def until(self, condition):
        deadline = time.monotonic() + 60
        while not condition():
            self.turn()
            assert time.monotonic() < deadline, (self.ended, self.fetched)
            time.sleep(0.002)

    def task(self, name, prompt=PROMPT, blocks=(5, 9, 2, 7), row=0):
        task = prefill(row, name, prompt, blocks)
        task.ic_req_data = {KEY: f"transfer of {name}"}
        task.need_prefill_tokens = len(prompt)
        ports = [str(channel.info.port) for channel in self.decode.channels]  # texts, as the router has them
        task.disaggregate_info = {"decode_ip": HOST, "decode_rdma_ports": ports}
        return task

    def fetch(self, name, slots, *ranks):
        self.decode.send(StartFetch(f"transfer of {name}", tuple(slots), 0), *ranks)

    def errors(self, name):
        return [self.fetched.get((f"transfer of {name}", rank), "open") for rank in range(len(self.decode.ranks))]

    def are_offered(self):
        """Every rank of decode has the offers that it reads from."""
        wanted = max(1, len(self.prefill.ranks) // len(self.decode.ranks))
        return all(role.transfers._fetches.num_offers == wanted for role in self.decode.roles)

    def check_idle(self):
        self.leases.check_idle()
        for role in self.prefill.roles + self.decode.roles:
            role.transfers.check_idle()


@pytest.fixture
def make(model, tmp_path):
    made = []

    def servers(prefill_size, decode_size):
        made.append(Servers(model, tmp_path, prefill_size, decode_size))
        return made[-1]

    yield servers
    for each in made:
        each.decode.close()
        each.prefill.close()


@pytest.fixture(scope="module")
def expected(model):
    return {"a": decode_alone(model, PROMPT, 6), "b": decode_alone(model, OTHER, 6)}


@pytest.mark.parametrize(("prefill_size", "decode_size"), [(2, 2), (2, 1), (1, 2)])
def test_tokens_are_those_of_one_server(make, expected, prefill_size, decode_size):
    """The last pair FastDeploy's own router refuses; here it is only one more way to split heads."""
    servers = make(prefill_size, decode_size)
    servers.fetch("a", [3, 1, 8])
    servers.prefill.insert(servers.task("a"))
    first = servers.prefill.tokens(1)
    servers.until(lambda: servers.ended and "open" not in servers.errors("a"))
    assert servers.ended == [["a", "finished"]]
    assert servers.errors("a") == [None] * decode_size
    servers.check_idle()
    assert servers.leases.ledger.totals == TransferTotals(started=1, arrived=1)
    servers.decode.insert(prefill(0, "a", PROMPT, [3, 1, 8, 11], start=len(PROMPT), outputs=first))
    assert first + servers.decode.tokens(5) == expected["a"]


def test_two_transfers_that_end_in_another_order_on_each_rank(make, expected):
    """Rank 0 of decode reads one, rank 1 the other: at prefill either has ended on one rank."""
    servers = make(2, 2)
    servers.prefill.insert(servers.task("a"))
    servers.prefill.insert(servers.task("b", OTHER, (1, 3), row=1))
    servers.prefill.tokens(1, rows=2)
    a, b = servers.prefill.sender.sent[-1][0]
    servers.fetch("a", [3, 1, 8], 0)
    servers.fetch("b", [4, 6], 1)
    servers.until(lambda: (servers.errors("a")[0], servers.errors("b")[1]) == (None, None))
    for _ in range(20):
        servers.turn()
    assert servers.ended == []
    servers.fetch("b", [4, 6], 0)
    servers.until(lambda: servers.ended)
    assert servers.ended == [["b", "finished"]]
    servers.fetch("a", [3, 1, 8], 1)
    servers.until(lambda: len(servers.ended) == 2)
    assert servers.ended[1] == ["a", "finished"]
    servers.until(lambda: "open" not in servers.errors("a") + servers.errors("b"))
    servers.check_idle()
    servers.decode.insert(prefill(0, "a", PROMPT, [3, 1, 8, 11], start=len(PROMPT), outputs=[a]))
    assert [a, *servers.decode.tokens(5)] == expected["a"]
    servers.decode.insert(other(ABORT, 0, "a"))
    servers.decode.tokens(1)
    servers.decode.insert(prefill(0, "b", OTHER, [4, 6, 12], start=len(OTHER), outputs=[b]))
    assert [b, *servers.decode.tokens(5)] == expected["b"]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_fetch_that_fails_on_one_rank_ends_on_every_one(make, failing):
    """The engine of decode tells its other ranks; that of prefill does, too, whichever comes first."""
    servers = make(2, 2)
    servers.fetch("a", [3, 1, 8])
    servers.prefill.insert(servers.task("a"))
    servers.until(servers.are_offered)
    servers.decode.send(CancelFetch("transfer of a", "its disk is on fire"), failing)
    servers.until(lambda: servers.ended and "open" not in servers.errors("a"))
    assert servers.ended == [["a", "error: its disk is on fire"]]
    assert servers.errors("a")[failing] == "its disk is on fire"
    assert "withdrew its blocks: its disk is on fire" in servers.errors("a")[1 - failing]
    servers.prefill.tokens(1)
    servers.turn()
    servers.check_idle()


@pytest.mark.parametrize("dying", [0, 1])
def test_a_decode_rank_that_dies_ends_the_lease_on_every_rank(make, dying):
    servers = make(2, 2)
    servers.fetch("a", [3, 1, 8])
    servers.prefill.insert(servers.task("a"))
    servers.until(servers.are_offered)
    servers.decode.is_gone = True  # FastDeploy ends the others: none of them answers
    servers.decode.roles[dying].transfers._fetches.close("killed")
    servers.until(lambda: servers.ended)
    ((request_id, status),) = servers.ended
    assert (request_id, status.startswith("error: ")) == ("a", True)
    servers.leases.check_idle()
    for role in servers.prefill.roles:
        role.transfers.check_idle()


@pytest.mark.parametrize("decode_size", [2, 1])
@pytest.mark.parametrize("dying", [0, 1])
def test_a_prefill_rank_that_dies_fails_the_fetch(make, dying, decode_size):
    """With one rank that reads from both, whatever the other one has."""
    servers = make(2, decode_size)
    servers.fetch("a", [3, 1, 8])
    servers.prefill.insert(servers.task("a"))
    servers.until(servers.are_offered)
    servers.prefill.is_gone = True
    servers.prefill.roles[dying].transfers._offers.close("killed")
    reader = dying if decode_size == 2 else 0
    servers.until(lambda: servers.errors("a")[reader] != "open")
    assert servers.errors("a")[reader] is not None
