"""Which storage a worker rank has, by what its configuration says."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1.fastdeploy_integration.settings import SESSION_VARIABLE, STORAGE_VARIABLE, export
from fastdeploy_kvcache_v1.fastdeploy_integration.worker import storage as storage_module
from fastdeploy_kvcache_v1.fastdeploy_integration.worker.storage import DeviceStorage, HostStorage, rank_storage
from fastdeploy_kvcache_v1.storage.settings import StorageSettings
from tests.fastdeploy_integration.fd_configs import fd_config

FILE = StorageSettings("file", "/unused")
ATTENTION = StorageSettings("attention_store")


@pytest.fixture(autouse=True)
def environment(monkeypatch, short_tmp_path):
    monkeypatch.setenv(SESSION_VARIABLE, "01234567")
    monkeypatch.setattr("tempfile.tempdir", short_tmp_path)


@pytest.fixture
def agents(monkeypatch):
    """What the agents are made with."""
    made = []
    for name in ("StorageAgent", "AttentionStoreAgent"):
        monkeypatch.setattr(storage_module, name, lambda *addresses, **given: made.append(given))
    return made


def config(settings, monkeypatch, *, host_blocks=0, caching=True):
    export(None, settings, environment := {})
    monkeypatch.setenv(STORAGE_VARIABLE, environment[STORAGE_VARIABLE])
    return fd_config(
        kvcache_storage_backend=settings.backend, kvcache_storage_gib=None,
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
    made = rank_storage(config(settings, monkeypatch, host_blocks=host_blocks, caching=caching))
    assert type(made) is (type(None) if kind is None else kind)
    assert len(agents) == (kind is not None)


@pytest.mark.parametrize(("flush_only", "uses_device_tier"), [(False, True), (True, False)])
def test_only_where_data_moves_passes_are_followed(agents, monkeypatch, flush_only, uses_device_tier):
    made = rank_storage(config(replace(ATTENTION, flush_only=flush_only), monkeypatch))
    assert made.uses_device_tier is uses_device_tier
    assert made.host_trailer_bytes == 0


def test_the_sdk_is_told_what_fastdeploy_would_tell_it(agents, monkeypatch):
    enter = object()
    rank_storage(config(ATTENTION, monkeypatch), device_id=6, on_gpu=True, enter_thread=enter)
    placement = {"device_id": 6, "dp_id": 1, "splitwise_role": "mixed", "default_namespace": "small"}
    assert agents == [{"rank": 3, "placement": placement, "on_gpu": True, "enter_thread": enter}]


@pytest.mark.parametrize(("settings", "host_stays"), [(FILE, "as the agent says"), (ATTENTION, True)])
def test_an_agent_is_given_the_tiers_and_lets_them_go(monkeypatch, settings, host_stays):
    """Where blocks do not go through the host tier, nothing of the store keeps it."""
    told = []
    agent = SimpleNamespace(use=lambda *given: told.append(given), let_go=lambda: told.append("let go") or host_stays)
    for name in ("StorageAgent", "AttentionStoreAgent"):
        monkeypatch.setattr(storage_module, name, lambda *_, **__: agent)
    monkeypatch.setattr(storage_module, "SlotMemory", lambda *given: given)
    monkeypatch.setattr(storage_module.DeviceCaches, "over", lambda rows, **given: (rows, sorted(given)))
    buffer = SimpleNamespace(array=SimpleNamespace(data="memory"), file="file")
    pool = SimpleNamespace(buffer=buffer, slot_bytes=64, memory_of_slot="memory of slot")
    transfers = SimpleNamespace(refilled=lambda *given, **more: (given, more), device_rows="rows", late_writes=None)
    controller = SimpleNamespace(host_pool=pool, transfers=transfers, caches=None)
    made = rank_storage(config(settings, monkeypatch, host_blocks=4))
    made.use(controller)
    assert made.let_go() == host_stays
    used, let_go = told
    assert let_go == "let go"
    if settings is FILE:
        assert used == ("memory of slot", ("memory", 64, "file"))
    else:
        assert used == (("rows", ["late_writes", "owner", "refilled"]),)
