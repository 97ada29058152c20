"""Objects of FastDeploy's whose cache manager is not ours: our patches leave them alone."""

import importlib
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from fastdeploy_kvcache_v1.fastdeploy_integration.engine import patches
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay.source import expected_parameters
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay.table import Kind, known_releases, table_for

WITH_A_CACHE = ("ResourceManagerV1", "EngineService", "SplitwiseConnector", "TokenProcessor")
"""Classes of FastDeploy's that have a cache manager, or an object that has one."""
ROWS = {
    row.ours: row
    for release in known_releases()
    for row in table_for(release).rows
    if row.kind is Kind.WRAP and row.qualname.split(".")[0] in WITH_A_CACHE
}


class Foreign:
    """It has what it is given, and no patch may look for more."""

    def __init__(self, **given):
        vars(self).update(given)


def load(reference):
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("ours", ROWS, ids=lambda ours: ours.rpartition(":")[2])
@pytest.mark.parametrize("cache", [MagicMock(), None], ids=["another cache", "no cache"])
def test_what_has_a_foreign_cache_manager_is_left_alone(ours, cache):
    config = Foreign(cache_config=Foreign(num_cpu_blocks=4, kvcache_storage_backend=None))
    instance, called = Foreign(cfg=config), []
    if cache is not None:
        is_manager = ROWS[ours].qualname.startswith("ResourceManagerV1")
        instance.cache_manager = instance.resource_manager = cache
        if is_manager:
            del instance.resource_manager
    given = tuple(Foreign(name=name) for name in expected_parameters(ROWS[ours].signature)[1:])

    def wrapped(*args, **kwargs):
        called.append((*args, *kwargs.values()))

    load(ours)(wrapped, instance, given, {})
    assert called == [given]


def test_a_cache_manager_is_ours_by_its_class_wherever_it_is():
    ours = patches.EnginePrefixCache.__new__(patches.EnginePrefixCache)
    manager = SimpleNamespace(cache_manager=ours)
    for instance in (manager, SimpleNamespace(resource_manager=manager)):
        assert patches.own_cache(instance, patches.EnginePrefixCache) is ours
        assert patches.own_cache(instance, MagicMock) is None
