"""Which storage a worker rank has, by what its configuration says."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1.fastdeploy_integration import storage_channel
from fastdeploy_kvcache_v1.fastdeploy_integration.worker import storage as storage_module
from fastdeploy_kvcache_v1.fastdeploy_integration.worker.storage import DeviceStorage, HostStorage, rank_storage
from fastdeploy_kvcache_v1.storage.settings import StorageSettings

FILE = StorageSettings("file", "/unused")
ATTENTION = StorageSettings("attention_store")


@pytest.fixture
def agents(monkeypatch, short_tmp_path):
    """What the agents are made with."""
    made = []
    for name in ("StorageAgent", "AttentionStoreAgent"):
        monkeypatch.setattr(storage_module, name, lambda *addresses, **given: made.append(given))
    monkeypatch.setattr("tempfile.tempdir", short_tmp_path)
    return made


def config(settings, monkeypatch, *, host_blocks=0, caching=True):
    monkeypatch.setenv(storage_channel.SETTINGS_VARIABLE, storage_channel.dumps(settings))
    monkeypatch.setenv(storage_channel.SESSION_VARIABLE, "01234567")
    return SimpleNamespace(
        cache_config=SimpleNamespace(
            kvcache_storage_backend=settings.backend,
            kvcache_storage_gib=None,
            num_cpu_blocks=host_blocks,
            enable_prefix_caching=caching,
        ),
        parallel_config=SimpleNamespace(
            local_engine_worker_queue_port=8001, tensor_parallel_rank=3, local_data_parallel_id=1
        ),
        scheduler_config=SimpleNamespace(splitwise_role="mixed"),
        model_config=SimpleNamespace(model="/models/small/"),
    )


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
