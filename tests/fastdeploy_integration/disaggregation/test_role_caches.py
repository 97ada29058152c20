"""The cache managers of both roles over a FAKE FastDeploy, with two ranks each that speak when the test says so."""

import os
from types import SimpleNamespace

import msgspec
import pytest

from fastdeploy_kvcache_v1.errors import CacheStateError
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation import patches, ranks, role_caches, settings
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.grants import Grants
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.leases import LeaseOpened
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.pausing import PREFILL_PAUSED
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.ranks import DecodeRank, PrefillRank
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.role_caches import INFO_FILE
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.transfer_name import name_of
from fastdeploy_kvcache_v1.fastdeploy_integration.engine import patches as engine_patches
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.same_id import HeldBack
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay import overlay
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay.table import Capabilities
from fastdeploy_kvcache_v1.fastdeploy_integration.settings import LOG_DIRECTORY
from fastdeploy_kvcache_v1.transfer.fetch import FetchResult
from fastdeploy_kvcache_v1.transfer.geometry import Geometry, RoleGeometry
from fastdeploy_kvcache_v1.transfer.ledger import Ledger
from fastdeploy_kvcache_v1.transfer.offer_desk import LeaseEnd
from fastdeploy_kvcache_v1.transfer.rank_messages import StartFetch, TransferNews, WithdrawLease
from fastdeploy_kvcache_v1.transfer.role_info import RankInfo, RoleInfo
from tests.fastdeploy_integration.engine.engine_cache import fake_fastdeploy, launch
from tests.fastdeploy_integration.fd_configs import fd_config

from .fake_requests import BLOCK, first_token, request

__all__ = ["fake_fastdeploy"]

PORT = 78


class Link:
    """In place of an `EngineLink`."""

    def __init__(self, port, num_ranks, log):
        assert (port, num_ranks) == (PORT, 2)
        self.sent = []

    def send(self, command):
        self.sent.append(command)
        return []

    def listen(self, handlers, on_gone):
        self.handlers = handlers

    def close(self):
        """Nothing is open."""


class Engine:
    def __init__(self, role):
        config = fd_config(splitwise_role=role, tensor_parallel_size=2, num_cpu_blocks=0)
        self.cache = launch(patches.CACHES[role](config), PORT)
        self.sent = self.cache.link.sent
        self.hear = self.cache.take_reports if role == "prefill" else self.cache.take_news
        """What FastDeploy's threads do again and again."""

    def tell(self, rank, *news):
        for each in news:
            self.cache.link.handlers[type(each)](rank, each)
        self.hear()
        self.cache.check()

    def grant(self, request_id="r", blocks=2):
        made = request(request_id, [5] * blocks * BLOCK)
        made.block_tables = self.cache.allocate_gpu_blocks(blocks, request_id)
        self.cache.grant(made)
        return made


@pytest.fixture
def logs(monkeypatch, tmp_path, fake_fastdeploy):
    (tmp_path / "secret").write_text("0123456789abcdef")
    (tmp_path / "secret").chmod(0o600)
    monkeypatch.setenv(settings.SECRET_FILE, str(tmp_path / "secret"))
    monkeypatch.setenv(settings.RANK, "")
    for name in (role_caches.WAIT_FOR_ANSWER, role_caches.ASK_UNTIL_GRANTED):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv(LOG_DIRECTORY, str(tmp_path))
    here = settings.RankPlace("127.0.0.1", (1, 2), "a model")
    monkeypatch.setattr(role_caches, "place_of", lambda config: here)
    monkeypatch.setattr(engine_patches, "engine_link", Link)
    return tmp_path


@pytest.fixture(params=["prefill", "decode"])
def engine(request, logs):
    return Engine(request.param)


prefill = pytest.mark.parametrize("engine", ["prefill"], indirect=True)
decode = pytest.mark.parametrize("engine", ["decode"], indirect=True)
OPENED = LeaseOpened("a", "request a")


def test_doctor_finds_all_ranks_in_one_file_in_their_order(engine, logs, monkeypatch, caplog):
    here, there = (
        Geometry("a model", BLOCK, 1, (RoleGeometry("key", "float32", 16, 1),), 2, 2, rank) for rank in (0, 1)
    )
    engine.tell(1, RankInfo(5, b"there", there))
    assert not (logs / INFO_FILE).exists(), "rank 0 has no caches yet"
    engine.tell(0, RankInfo(4, b"here", here))
    info = msgspec.json.decode((logs / INFO_FILE).read_bytes(), type=RoleInfo)
    assert (info.plane, info.host, [rank.port for rank in info.ranks]) == ("socket", "127.0.0.1", [4, 5])
    assert [rank.geometry for rank in info.ranks] == [here, there]
    monkeypatch.setenv(LOG_DIRECTORY, str(logs / "nowhere"))
    engine.tell(0, RankInfo(4, b"here", here))
    assert "cannot be written, so doctor cannot check this server" in caplog.text, "and serving goes on"


@prefill
def test_a_prefill_engine_hears_of_a_transfer_when_it_has_ended_on_both_ranks_and_gives_up_others(engine, caplog):
    engine.tell(0, LeaseEnd("stray", "stray", None), OPENED, LeaseEnd("a", "a", None))
    assert "lease stray, which is not open" in caplog.text
    assert engine.cache.take_transfer_ends() == []
    engine.tell(1, OPENED, LeaseEnd("a", "a", None))
    assert engine.cache.take_transfer_ends() == [["request a", "finished"]]
    engine.tell(0, LeaseOpened("b", "request b"))
    engine.cache.give_up(None)
    assert engine.sent == [WithdrawLease("b", PREFILL_PAUSED)]


@decode
def test_a_decode_engine_starts_a_request_when_both_ranks_have_its_blocks(engine):
    made = engine.grant()
    engine.cache.take_token(first_token(made))
    assert engine.sent == [StartFetch(name_of(made), tuple(made.block_tables), 0)]
    for rank in (1, 0):
        assert engine.cache.take_ready(lambda _: True) == []
        engine.tell(rank, TransferNews(fetches=(FetchResult(name_of(made), 8, 1.0),)))
    assert [grant.request for grant in engine.cache.take_ready(lambda _: True)] == [made]


class Queue:
    """FastDeploy's EngineWorkerQueue; nothing of a messager may reach it."""

    def get_finished_req(self):
        return "FastDeploy's own"


@pytest.mark.parametrize("acknowledges", [True, False])
def test_what_the_engine_would_ask_its_messager_it_asks_us_at_prefill(engine, monkeypatch, acknowledges):
    table = SimpleNamespace(capabilities=Capabilities(acknowledged_cache_info=acknowledges))
    monkeypatch.setattr(overlay, "active", lambda: SimpleNamespace(table=table))
    queue, manager, given = Queue(), SimpleNamespace(cache_manager=engine.cache), []
    patches.answer_for_messager(given.append, SimpleNamespace(engine_worker_queue=queue), (manager,), {})
    assert given == [manager]
    if isinstance(engine.cache, role_caches.DecodeCache):
        assert (queue.get_finished_req(), vars(queue)) == ("FastDeploy's own", {})
        return
    engine.cache.leases = SimpleNamespace(take_ended=lambda: [["a", "finished"]])
    assert queue.get_finished_req() == [["a", "finished"]]
    queue.put_cache_info([{"request_id": name, "src_block_ids": [1]} for name in "ab"])
    queue.put_cache_info([{"request_id": "a", "dest_block_ids": [3]}])
    assert hasattr(queue, "get_finished_add_cache_task_req") == acknowledges
    if acknowledges:
        assert [queue.get_finished_add_cache_task_req() for _ in range(2)] == [["a", "b"], []]


def reset(engine, *, known=()):
    """FastDeploy's controller resets a server; whether its gate was open meanwhile."""
    seen = []
    manager = SimpleNamespace(cache_manager=engine.cache, requests=dict.fromkeys(known))
    clear = lambda: seen.append(engine.cache.gate.is_open)  # noqa: E731
    engine_patches.clear_data(clear, SimpleNamespace(resource_manager=manager), (), {})
    return seen


def test_a_server_is_reset_behind_its_closed_gate_and_stays_paused(engine):
    gate = engine.cache.gate
    engine.cache.held_back = HeldBack()
    assert (reset(engine), gate.is_open) == ([False], True)
    gate.close()
    assert (reset(engine), gate.is_open) == ([False], False)
    with engine.cache.clearing(SimpleNamespace(requests={})):
        gate.open()
        assert not gate.is_open, "before the reset is over"
    assert gate.is_open
    with engine.cache.clearing(SimpleNamespace(requests={})):
        gate.close()
    assert not gate.is_open


def test_a_server_with_a_request_or_with_blocks_that_a_peer_shares_is_not_reset(engine):
    with pytest.raises(CacheStateError, match="here 1"):
        reset(engine, known=["a"])
    assert engine.cache.gate.is_open
    if isinstance(engine.cache, role_caches.PrefillCache):
        engine.tell(0, OPENED)
    else:
        engine.grant()
    with pytest.raises(CacheStateError, match=r"here 0.* shares blocks with a peer: pause it"):
        reset(engine)


def test_workers_and_fastdeploy_are_told_what_a_role_needs(engine):
    assert settings.rank_place() == settings.RankPlace("127.0.0.1", (1, 2), "a model")
    if isinstance(engine.cache, role_caches.PrefillCache):
        told = [os.environ[name] for name in (role_caches.WAIT_FOR_ANSWER, role_caches.ASK_UNTIL_GRANTED)]
        assert told == ["1", "0"], "what the user has set is kept, and asking again is ours"
    assert engine.cache.followers.passes_over(None, None) is False, "requests wait for another server"


def test_what_a_role_counts_is_exported_with_its_side(engine):
    shown = [part for part in engine.cache.publisher._parts if isinstance(part[0], Ledger | Grants)]
    if isinstance(engine.cache, role_caches.PrefillCache):
        assert shown == [(engine.cache.leases.ledger, ("prefill",))]
    else:
        assert shown == [(engine.cache.grants.ledger, ("decode",)), (engine.cache.grants, ())]


@prefill
def test_released_requests_of_prefill_wait_until_a_thread_takes_them(engine):
    asked = []
    engine.cache.release_stored(SimpleNamespace(release=asked.append), "FastDeploy's manager")
    assert asked == ["FastDeploy's manager"]


@decode
def test_no_rank_is_told_to_fetch_while_a_batch_is_put_together_and_what_is_shared_is_counted(engine):
    engine.cache.take_reports()
    made = engine.grant()
    assert engine.cache.carrier(None) == [], "no copies wait"
    assert (engine.sent, engine.cache.num_shared) == ([], 1 + 1), "what waits, and what is to be fetched"
    engine.cache.send_swaps([])
    assert [type(each) for each in engine.sent] == [StartFetch]
    engine.cache.recycle_gpu_blocks(made.block_tables, "r")
    assert engine.cache.num_shared == 0 + 1 + 2, "with parked blocks"


@decode
def test_copies_that_wait_ride_on_a_batch_with_an_empty_table(engine):
    engine.cache.copies_wait = lambda: SimpleNamespace(request="granted")
    manager = SimpleNamespace(_prepare_decode_task=lambda made: SimpleNamespace(of=made, block_tables=[1, 2]))
    assert engine.cache.carrier(manager) == [SimpleNamespace(of="granted", block_tables=[])]


@pytest.mark.parametrize(("ports", "expected"), [(["5", 6], (5, 6)), (None, ())])
def test_the_place_of_a_server_names_its_weights(monkeypatch, ports, expected):
    monkeypatch.setattr(role_caches, "model_digest", lambda path: f"digest of {path}")
    made = role_caches.place_of(fd_config(model="/m", quantization="wint4", local_rdma_comm_ports=ports))
    assert made == settings.RankPlace("10.0.0.1", expected, "digest of /m 'wint4'")


@pytest.mark.parametrize(("role", "kind"), [("prefill", PrefillRank), ("decode", DecodeRank), ("mixed", None)])
def test_a_rank_has_the_role_of_its_server(logs, role, kind):
    settings.export(settings.RankPlace("127.0.0.1", (1,), "a model"))
    made = ranks.rank_role(fd_config(splitwise_role=role), print)
    assert made is None if kind is None else type(made) is kind
