"""The CPU worker's tables name functions that exist and have the right kind."""

import importlib
import inspect

import pytest

from fastdeploy_kvcache_v1.fastdeploy_integration.cpu_worker.activation import TABLE_NAME
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay.table import Kind, known_releases, load_table, table_directory


@pytest.mark.parametrize("release", ["2.5", "2.6"])
def test_every_function_exists(release):
    table = load_table(table_directory() / TABLE_NAME.format(release=release))
    assert table.release == release
    for row in table.rows:
        module, _, name = row.ours.partition(":")
        function = getattr(importlib.import_module(module), name)
        expected = ["wrapped", "instance", "args", "kwargs"] if row.kind is Kind.WRAP else ["original"]
        assert list(inspect.signature(function).parameters) == expected, row.target


def test_they_are_no_releases_of_the_overlay():
    assert not [release for release in known_releases() if "cpu" in release]
