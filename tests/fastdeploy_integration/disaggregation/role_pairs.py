"""A prefill and a decode runner with the real model and real sockets between them; their engines are a few tasks."""

import time

import pytest

from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.leases import LeaseOpened, Leases
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.ranks import DecodeRank, PrefillRank
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.settings import RankPlace, TransferChoice
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.transfer_name import KEY
from fastdeploy_kvcache_v1.transfer.offer_desk import LeaseEnd
from fastdeploy_kvcache_v1.transfer.rank_messages import StartFetch, TransferNews
from fastdeploy_kvcache_v1.transfer.role_info import RankInfo
from fastdeploy_kvcache_v1.transfer.settings import TransferSettings
from tests.lab.fastdeploy_cpu.host_tasks import prefill
from tests.lab.fastdeploy_cpu.runners import PROMPT, injected, run, start_runner
from tests.transfer.planes import HOST, SECRET

SLOTS = [3, 1, 8]
"""Where a decode server wants PROMPT."""


class Channel:
    """The engine's end of a rank."""

    def __init__(self):
        self.news, self.info = [], None
        self.told, self._request_ids = [], {}

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
    def __init__(self, model, directory, port=0, copy_faults=""):
        """`copy_faults` of the prefill runner, which alone has a host tier."""
        settings = TransferSettings(secret=SECRET, ping_s=0.1)
        choice, place = TransferChoice(settings, "socket", True), RankPlace(HOST, (port,), "the model")
        self.offers, self.channel = Channel(), Channel()
        self.roles = PrefillRank(choice, place, self.offers.tell), DecodeRank(choice, place, self.channel.tell)
        self.leases = self.offers.leases = Leases(num_ranks=1, send=self.roles[0].hear)
        self.told = self.offers.told
        both = {"prefill": (8, copy_faults), "decode": (0, "")}
        for (name, (host_blocks, faults)), role in zip(both.items(), self.roles, strict=True):
            (directory / name).mkdir()
            with injected(faults):
                made = start_runner(model, directory / name, host_blocks=host_blocks, transfers=role)
            setattr(self, name, made)

    def prefill_task(self, name="a", prompt=PROMPT, blocks=(5, 9, 2, 7), row=0, transfer=None, **chunk):
        task = prefill(row, name, prompt, blocks, **chunk)
        task.ic_req_data = {KEY: transfer or f"transfer of {name}"}
        task.need_prefill_tokens = len(prompt)
        task.disaggregate_info = {"decode_ip": HOST, "decode_rdma_ports": [self.roles[1].transfers.port]}
        return task

    def fetch(self, slots=SLOTS, name="a", after_step=-1):
        self.roles[1].hear(StartFetch(f"transfer of {name}", tuple(slots), 0, after_step))

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

    def forget(self):
        """What was told of transfers before."""
        self.told.clear()
        self.channel.news.clear()

    def settled(self):
        self.until(lambda: self.told and self.channel.news)
        return self.told[-1], self.channel.news[-1].error

    def offered(self):
        """The decode rank knows of the lease."""
        self.until(lambda: self.roles[1].transfers._fetches.num_offers)

    def continued(self, first):
        """The decode server's tokens after the one of prefill."""
        self.decode.insert_tasks([prefill(0, "a", PROMPT, [*SLOTS, 11], start=len(PROMPT), outputs=[first])])
        return run(self.decode, 5)

    def check_idle(self):
        for role in self.roles:
            role.transfers.check_idle()

    def close(self):
        for runner in (self.prefill, self.decode):
            runner.drop_caches()


@pytest.fixture
def make_pair(model, tmp_path):
    made = []

    def make(**options):
        made.append(Pair(model, tmp_path, **options))
        return made[-1]

    yield make
    for pair in made:
        pair.close()


@pytest.fixture
def pair(make_pair):
    return make_pair()
