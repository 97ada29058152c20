"""Syntax of patch tables, and the tables we ship."""

import importlib
import inspect

import pytest

from fastdeploy_kvcache_v1.errors import OverlayError
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay.table import Kind, known_releases, load_table, table_for
from tests.fastdeploy_integration import fake_fastdeploy

GOOD = fake_fastdeploy.row("fakefd", "Engine.schedule", "wrap_schedule", signature="(self)")


def load(tmp_path, *rows):
    return load_table(fake_fastdeploy.write_table(tmp_path, list(rows)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "patch"}, "'patch' is not a valid Kind"),
        ({"where": "router"}, "'router' is not a valid Where"),
        ({"target": "fakefd.engine.Engine"}, "not of the form"),
        ({"ours": "os.path"}, "not of the form"),
        ({"signature": ""}, "wrap and replace need `signature`"),
        ({"kind": "extend"}, "extend needs `adds`"),
        ({"colour": "red"}, "unknown colour"),
    ],
)
def test_bad_rows_are_named(tmp_path, change, message):
    with pytest.raises(OverlayError, match=message) as caught:
        load(tmp_path, {**GOOD, **change})
    assert "patch table fake-9.1.toml: " in str(caught.value)


@pytest.mark.parametrize("field", ["kind", "ours", "where", "why"])
def test_missing_fields_are_named(tmp_path, field):
    with pytest.raises(OverlayError, match=f"no {field}"):
        load(tmp_path, {key: value for key, value in GOOD.items() if key != field})


def test_unknown_release():
    with pytest.raises(OverlayError, match=r"FastDeploy 1.0 is not supported .*2.5, 2.6.*unset"):
        table_for("1.0")


def test_not_a_table(tmp_path):
    path = tmp_path / "table.toml"
    path.write_text("[fastdeploy]\n", encoding="utf-8")
    with pytest.raises(OverlayError, match=r"table.toml: no 'release'"):
        load_table(path)


@pytest.mark.parametrize("release", known_releases())
def test_our_tables_name_functions_that_exist(release):
    table = table_for(release)
    assert table.release == release
    for row in table.rows:
        module, _, name = row.ours.partition(":")
        assert module.startswith("fastdeploy_kvcache_v1.fastdeploy_integration.")
        function = getattr(importlib.import_module(module), name)
        parameters = list(inspect.signature(function).parameters)
        assert len(parameters) == (4 if row.kind is Kind.WRAP else 1), row.ours
        assert row.why.endswith(".")
