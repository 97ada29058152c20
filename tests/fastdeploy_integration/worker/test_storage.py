"""Which storage a worker rank has, by what its configuration says."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1.fastdeploy_integration.settings import STORAGE_VARIABLE, export
from fastdeploy_kvcache_v1.fastdeploy_integration.worker import storage as storage_module
from fastdeploy_kvcache_v1.fastdeploy_integration.worker.storage import DeviceStorage, HostStorage, rank_storage
from fastdeploy_kvcache_v1.link.messages import Gone, Memory, Released
from fastdeploy_kvcache_v1.storage import host_memory
from fastdeploy_kvcache_v1.storage.settings import StorageSettings
from fastdeploy_kvcache_v1.switch import SESSION_VARIABLE
from tests.fastdeploy_integration.fd_configs import fd_config

FILE = StorageSettings("file")
ATTENTION = StorageSettings("attention_store")


@pytest.fixture(autouse=True)
def environment(monkeypatch, short_tmp_path):
    monkeypatch.setenv(SESSION_VARIABLE, "01234567")
    monkeypatch.setattr("tempfile.tempdir", short_tmp_path)


@pytest.fixture
def agents(monkeypatch):
    """What the agents are made with."""
    made = []

    def make(answer, **given):
        made.append(given)
        return SimpleNamespace(handlers={})

    monkeypatch.setattr(storage_module, "AttentionStoreAgent", make)
    return made


def config(settings, monkeypatch, *, host_blocks=0, caching=True):
    export(None, settings, environment := {})
    monkeypatch.setenv(STORAGE_VARIABLE, environment[STORAGE_VARIABLE])
    return fd_config(
        kvcache_storage_backend=settings.backend, storage_prefetch=None,
        num_cpu_blocks=host_blocks, enable_prefix_caching=caching,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "host_blocks", "caching", "kind"),
    [
        (FILE, 4, True, HostStorage),
        (FILE, 0, True, None),
        (FILE, 4, False, None),
        (ATTENTION, 0, True, DeviceStorage),
        (ATTENTION, 4, True, DeviceStorage),
        (ATTENTION, 4, False, None),
    ],
)
def test_which_tier_a_store_needs(agents, monkeypatch, settings, host_blocks, caching, kind):
    made = rank_storage(config(settings, monkeypatch, host_blocks=host_blocks, caching=caching), Link())
    assert type(made) is (type(None) if kind is None else kind)
    assert len(agents) == (kind is DeviceStorage)


@pytest.mark.parametrize(("flush_only", "uses_device_tier"), [(False, True), (True, False)])
def test_only_where_data_moves_passes_are_followed(agents, monkeypatch, flush_only, uses_device_tier):
    made = rank_storage(config(replace(ATTENTION, flush_only=flush_only), monkeypatch), Link())
    assert made.uses_device_tier is uses_device_tier
    assert made.host_trailer_bytes == 0


def test_the_sdk_is_told_what_fastdeploy_would_tell_it(agents, monkeypatch):
    enter = object()
    rank_storage(config(ATTENTION, monkeypatch), Link(), device_id=6, on_gpu=True, enter_thread=enter)
    placement = {"device_id": 6, "dp_id": 1, "splitwise_role": "mixed", "default_namespace": "small"}
    assert agents == [{"rank": 3, "placement": placement, "on_gpu": True, "enter_thread": enter}]


def test_an_agent_is_given_the_device_tier_and_lets_it_go(monkeypatch):
    told = []
    agent = SimpleNamespace(handlers={}, use=told.append, let_go=lambda: told.append("let go"))
    monkeypatch.setattr(storage_module, "AttentionStoreAgent", lambda *_, **__: agent)
    monkeypatch.setattr(storage_module.DeviceCaches, "over", lambda rows, **given: (rows, sorted(given)))
    transfers = SimpleNamespace(refilled=None, device_rows="rows", late_writes=None)
    made = rank_storage(config(ATTENTION, monkeypatch), Link())
    made.use(SimpleNamespace(transfers=transfers, caches=None))
    made.let_go()
    assert told == [("rows", ["late_writes", "owner", "refilled"]), "let go"]


@pytest.mark.parametrize("answers", [True, False])
def test_the_host_tier_is_named_anew_each_time_it_is_made(monkeypatch, answers):
    """A store process that does not answer costs time, and no worker."""
    monkeypatch.setattr(host_memory, "RELEASE_S", 0.01)
    link = Link(answers=answers)
    pool = SimpleNamespace(buffer=SimpleNamespace(file=9), num_blocks=4, slot_bytes=640)
    made = rank_storage(config(FILE, monkeypatch, host_blocks=4), link)
    link.handlers = made.handlers
    for _ in range(2):
        made.use(SimpleNamespace(host_pool=pool))
        made.let_go()
    expected = [message for number in range(2) for message in ((Memory(number, 4, 640), 9), (Gone(number), None))]
    assert link.sent == expected


class Link:
    """FAKE: notes what is sent, and answers at once that memory is released."""

    is_connected = True

    def __init__(self, *, answers=True):
        self.sent, self.handlers, self._answers = [], {}, answers

    def send(self, message, descriptor=None):
        self.sent.append((message, descriptor))
        if isinstance(message, Gone) and self._answers:
            self.handlers[Released](Released(message.generation))
