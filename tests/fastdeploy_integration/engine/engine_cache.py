"""The cache manager that an engine makes and launches, over FAKE modules of FastDeploy."""

import logging
import tempfile
from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1.fastdeploy_integration import settings
from fastdeploy_kvcache_v1.fastdeploy_integration.engine import metrics
from fastdeploy_kvcache_v1.fastdeploy_integration.engine import patches as engine_patches
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay.overlay import Overlay
from fastdeploy_kvcache_v1.telemetry.metrics import source_of
from tests.fastdeploy_integration.fd_configs import fd_config

from .by_hand import make_gauges


class FakeSignal:
    """A FAKE IPCSignal that notes who opens what."""

    opened = None

    def __init__(self, name, array, dtype, suffix, create):
        assert not create
        self.opened.append((name, len(array), suffix))
        self.value = array


@pytest.fixture
def fake_fastdeploy(install, monkeypatch, short_tmp_path, tmp_path):
    """The modules of FastDeploy that the cache manager asks inside FastDeploy. Returns its `envs`. `tmp_path` is asked
    for first: it would lie in the directory for temporary files of this test, which goes."""
    envs = SimpleNamespace(FD_ENABLE_V1_UPDATE_WEIGHTS=False, FD_ATTENTION_BACKEND="APPEND_ATTN")
    modules = {
        "fastdeploy": {"envs": envs},
        "fastdeploy.metrics": {},
        "fastdeploy.metrics.metrics": {"main_process_metrics": make_gauges()},
        "fastdeploy.inter_communicator": {"IPCSignal": FakeSignal},
        "fastdeploy.utils": {"llm_logger": logging.getLogger("fake")},
    }
    install(modules)
    monkeypatch.setattr(tempfile, "tempdir", short_tmp_path)
    active = SimpleNamespace(table=SimpleNamespace(release="2.6"), metrics=source_of(Overlay))
    monkeypatch.setattr(engine_patches.overlay, "active", lambda: active)
    nothing = SimpleNamespace(publish=lambda *_: None, observe=lambda *_: None)
    monkeypatch.setattr(metrics, "exported", lambda source: nothing)
    envs.exported = []
    monkeypatch.setattr(settings, "export", lambda *given: envs.exported.append(given))
    monkeypatch.setattr(FakeSignal, "opened", [])
    made, listen = [], engine_patches.engine_link
    monkeypatch.setattr(engine_patches, "engine_link", lambda *given: made.append(listen(*given)) or made[-1])
    yield envs
    for link in made:
        link.close()


def launch(manager, port=77, num_ranks=2):
    cache = manager._config.cache_config
    assert manager.launch_cache_manager(cache, num_ranks, "0", "127.0.0.1", port, None, False) == []
    if manager.updates is not None:
        manager.updates.stop()
    return manager


def launched(num_ranks=2, **given):
    """The cache manager of an engine that has launched its cache service."""
    cache = engine_patches.EnginePrefixCache(fd_config(tensor_parallel_size=num_ranks, **given))
    return launch(cache, num_ranks=num_ranks)
