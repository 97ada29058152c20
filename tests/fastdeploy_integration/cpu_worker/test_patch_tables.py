"""The CPU worker's tables name functions that exist and have the right kind."""

import importlib
import inspect

import pytest

from fastdeploy_kvcache_v1.errors import OverlayError
from fastdeploy_kvcache_v1.fastdeploy_integration.cpu_worker.activation import TABLE_NAME, table_for
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay.table import Kind, known_releases


@pytest.mark.parametrize("release", known_releases(TABLE_NAME))
def test_every_function_exists(release):
    table = table_for(release)
    assert table.release == release
    for row in table.rows:
        module, _, name = row.ours.partition(":")
        function = getattr(importlib.import_module(module), name)
        expected = ["wrapped", "instance", "args", "kwargs"] if row.kind is Kind.WRAP else ["original"]
        assert list(inspect.signature(function).parameters) == expected, row.target


def test_an_unknown_release_names_those_that_work():
    with pytest.raises(
        OverlayError, match=r"FastDeploy 9\.1 is not known to the CPU worker: install one of 2\.5, 2\.6"
    ):
        table_for("9.1")


def test_they_are_no_releases_of_the_overlay():
    assert not [release for release in known_releases() if "cpu" in release]
