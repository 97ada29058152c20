"""The loader against FAKE FastDeploys: drifted, half imported, imported before or after us."""

import asyncio
import importlib
import itertools
import sys
import textwrap
from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1.errors import OverlayError
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay import overlay as overlay_module
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay.overlay import Overlay, PointState
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay.table import Where, load_table
from tests.fastdeploy_integration import fake_fastdeploy

NUMBERS = itertools.count()


@pytest.fixture
def package(monkeypatch, tmp_path):
    """A package name never used before: import hooks cannot be taken back."""
    name = f"fakefastdeploy{next(NUMBERS)}"
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    fake_fastdeploy.forget(name)


def overlay(tmp_path, package, rows=None, **tree):
    root = fake_fastdeploy.write(tmp_path, package, **tree)
    path = fake_fastdeploy.write_table(tmp_path, rows or fake_fastdeploy.rows(package))
    return Overlay(load_table(path), root)


def expect_patched(package):
    engine = importlib.import_module(f"{package}.engine")
    made = engine.Engine(7)
    assert made.part[0] == "ours"
    assert made.part[1].size == 7
    assert made.schedule() == (["task", made.part], [])
    assert engine.Engine.helper(True) == ("wrapped", True)
    assert asyncio.run(made.wait("id", executors=["worker"])) == ("wrapped", ["worker"])
    assert importlib.import_module(f"{package}.parts").names == {"old": 1, "new": 2}


def test_rows_wait_for_their_modules(tmp_path, package):
    made = overlay(tmp_path, package)
    made.start()
    assert set(made.states().values()) == {PointState.WAITING}
    assert f"{package}.engine" not in sys.modules
    expect_patched(package)
    assert set(made.states().values()) == {PointState.APPLIED}
    made.require_complete(Where.ENGINE)


def test_modules_imported_before_us_are_patched_at_once(tmp_path, package):
    made = overlay(tmp_path, package)
    importlib.import_module(f"{package}.engine")
    made.start()
    assert set(made.states().values()) == {PointState.APPLIED}
    expect_patched(package)


HALF = "import builtins\nbuiltins.start_overlay()\n" + textwrap.dedent(fake_fastdeploy.ENGINE)
"""It starts us while it is being imported."""


def test_half_imported_modules_are_patched_once_they_are_whole(tmp_path, package, monkeypatch):
    made = overlay(tmp_path, package, engine=HALF)

    def start_and_serve():
        made.start()
        with pytest.raises(OverlayError, match="still being imported"):
            made.require_complete(Where.ENGINE)

    monkeypatch.setattr("builtins.start_overlay", start_and_serve, raising=False)
    module = importlib.import_module(f"{package}.engine")
    in_engine = [state for row, state in made.states().items() if row.module == f"{package}.engine"]
    assert set(in_engine) == {PointState.DEFERRED}
    assert module.Engine(7).schedule() == (["task"], [])
    made.complete()
    expect_patched(package)
    made.require_complete(Where.ENGINE)


@pytest.mark.parametrize(
    ("changes", "problems"),
    [
        (
            {"def schedule(self)": "def schedule(self, budget)"},
            {"Engine.schedule": "drifted: expected (self), FastDeploy has (self, budget)"},
        ),
        (
            {"def schedule": "def plan", "flag=False": "flag=True", "executors=None": "executors=()"},
            {
                "Engine.schedule": "missing",
                "Engine.helper": "drifted: expected (flag=False), FastDeploy has (flag=True)",
                "Engine.wait": "drifted: expected (self, request_id, executors=None), "
                "FastDeploy has (self, request_id, executors=())",
            },
        ),
        ("no parts.py", {"Part": "missing", "names": "missing"}),
    ],
)
def test_drifted_fastdeploy_is_named_and_left_alone(tmp_path, package, changes, problems):
    engine = fake_fastdeploy.ENGINE
    for change in changes.items() if isinstance(changes, dict) else ():
        engine = engine.replace(*change)
    made = overlay(tmp_path, package, engine=engine)
    if changes == "no parts.py":
        (tmp_path / package / "parts.py").unlink()
    assert {row.qualname: text for row, text in made.problems().items()} == problems
    with pytest.raises(OverlayError) as caught:
        made.start()
    assert all(f"{name} {text}" in str(caught.value) for name, text in problems.items())
    assert "unset ENABLE_V1_KVCACHE_MANAGER" in str(caught.value)
    assert set(made.states().values()) == {PointState.WAITING}
    if changes != "no parts.py":
        assert importlib.import_module(f"{package}.engine").Engine(7).part.size == 7


def test_what_we_add_must_not_be_there_yet(tmp_path, package):
    rows = [fake_fastdeploy.row(package, "names", "extend_names", kind="extend", adds=["old", "new"])]
    assert list(overlay(tmp_path, package, rows).problems().values()) == ["drifted: FastDeploy has old itself"]


def test_what_we_add_may_be_there_where_the_row_says_that_it_is_optional(tmp_path, package):
    adds = {"kind": "extend", "adds": ["old", "new"], "optional": ["old"]}
    assert overlay(tmp_path, package, [fake_fastdeploy.row(package, "names", "extend_names", **adds)]).problems() == {}


def test_target_replaced_by_another_plugin(tmp_path, package):
    made = overlay(tmp_path, package)
    module = importlib.import_module(f"{package}.engine")
    module.Engine.schedule = lambda self, extra: None
    with pytest.raises(OverlayError, match=r"schedule takes \['self', 'extra'\], expected \['self'\]"):
        made.start()
    with pytest.raises(OverlayError, match="not patched"):
        made.require_complete(Where.ENGINE)


@pytest.mark.parametrize("where", [Where.ENGINE, Where.WORKER])
def test_failing_hook_reaches_the_importer_and_the_other_side_serves(tmp_path, package, where):
    broken = {"ours": "no_such_function", "signature": "(self)", "where": where.value}
    made = overlay(tmp_path, package, [fake_fastdeploy.row(package, "Engine.schedule", **broken)])
    made.start()
    with pytest.raises(AttributeError, match="no_such_function"):
        importlib.import_module(f"{package}.engine")
    importlib.import_module(package)
    assert set(made.states().values()) == {PointState.FAILED}
    with pytest.raises(OverlayError, match="so the server ends"):
        made.require_complete(where)
    made.require_complete(Where.WORKER if where is Where.ENGINE else Where.ENGINE)


@pytest.fixture
def process(monkeypatch):
    """A process in which nothing was started: its FastDeploy, and what was started in it."""
    made = SimpleNamespace(fastdeploy=SimpleNamespace(has_own_manager=False), started=[], broken=None)

    def start():
        made.started.append(True)
        if made.broken:
            raise made.broken

    monkeypatch.setattr(overlay_module, "_active", None)
    monkeypatch.setattr(overlay_module, "_refusal", None)
    monkeypatch.setattr(overlay_module, "installed_fastdeploy", lambda: made.fastdeploy)
    monkeypatch.setattr(overlay_module, "overlay_for", lambda tree: SimpleNamespace(start=start, tree=tree))
    return made


def test_the_overlay_of_a_process_is_started_once(process):
    with pytest.raises(OverlayError, match="is not patched in this process"):
        overlay_module.active()
    first = overlay_module.start()
    assert first.tree is process.fastdeploy
    assert overlay_module.start() is overlay_module.active() is first
    assert process.started == [True]


def test_a_start_that_failed_fails_for_ever(process):
    process.broken = OverlayError("drifted")
    for reason in ("^drifted", "^FastDeploy was not patched in this process: drifted"):
        with pytest.raises(OverlayError, match=reason):
            overlay_module.start()
    assert process.started == [True], "something may be patched by now"


@pytest.mark.parametrize(("fastdeploy", "warned"), [(None, 0), (SimpleNamespace(has_own_manager=True), 1)])
def test_where_there_is_nothing_to_patch_nothing_is_started(process, caplog, fastdeploy, warned):
    process.fastdeploy = fastdeploy
    assert overlay_module.start() is None
    assert (process.started, len(caplog.messages)) == ([], warned)
