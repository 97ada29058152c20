"""Activation: what the `.pth` line does, and that it does nothing unless asked."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastdeploy_kvcache_v1 import plugin
from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.switch import SWITCH

from .fastdeploy_integration import fake_fastdeploy

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[1]
BOOTSTRAP = (ROOT / "fastdeploy_kvcache_v1.pth").read_text(encoding="utf-8")


def python(tmp_path, code, switch):
    """Run the bootstrap line as `site` does, then `code`, with a FAKE package named fastdeploy importable."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    environment.pop(SWITCH, None)
    if switch is not None:
        environment[SWITCH] = switch
    command = [sys.executable, "-c", BOOTSTRAP + code]
    return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60)


def test_the_bootstrap_is_one_import_line():
    assert BOOTSTRAP.startswith("import ")
    assert BOOTSTRAP.count("\n") == 1


TRY_TWICE = """
for attempt in (1, 2, 3):
    try:
        import fastdeploy
        print("imported")
    except Exception as e:
        print(type(e).__name__, e)
"""
DRIFTED = "patch table does not fit: "


def assert_refused(done, line):
    said = done.stdout.splitlines()
    assert [each.startswith("OverlayError ") and line in each for each in said] == [True] * 3, said


@pytest.mark.parametrize(("version", "line"), [("9.1.0", "FastDeploy 9.1 is not supported"), ("2.6.0", DRIFTED)])
def test_second_import_of_a_refused_fastdeploy_is_refused_too(tmp_path, version, line):
    fake_fastdeploy.write(tmp_path, "fastdeploy", version=version)
    assert_refused(python(tmp_path, TRY_TWICE, "1"), line)


@pytest.mark.parametrize(
    ("version", "switch", "line"), [("9.1.0", "1", "FastDeploy 9.1 is not supported"), ("2.6.0", "2", "must be 0 or 1")]
)
def test_uncaught_refusal_is_one_line(tmp_path, version, switch, line):
    fake_fastdeploy.write(tmp_path, "fastdeploy", version=version)
    done = python(tmp_path, "\nimport fastdeploy", switch)
    assert done.returncode == 1
    (said,) = done.stderr.splitlines()
    assert said.startswith("fastdeploy-kvcache: error: ")
    assert line in said


def test_other_errors_keep_their_traceback(tmp_path):
    root = fake_fastdeploy.write(tmp_path, "fastdeploy", version="9.1.0")
    (root / "cache_manager" / "v1").mkdir(parents=True)
    done = python(tmp_path, "\nimport fastdeploy; raise ValueError('of the host')", "1")
    assert "Traceback" in done.stderr
    assert done.stderr.endswith("ValueError: of the host\n")


def test_nor_where_only_its_plugin_groups_call_us(tmp_path):
    """They call a plugin once in a process: an import after a failed one goes past them."""
    loads_plugins = """
        import sys
        from fastdeploy_kvcache_v1 import plugin
        if not hasattr(sys, "plugins_loaded"):
            sys.plugins_loaded = True
            plugin.register()
    """
    fake_fastdeploy.write(tmp_path, "fastdeploy", version="2.6.0", init=loads_plugins)
    stand_by = "\nfrom fastdeploy_kvcache_v1 import plugin; plugin.stand_by()"
    assert_refused(python(tmp_path, stand_by + TRY_TWICE, "1"), DRIFTED)


def test_a_fastdeploy_with_its_own_manager_is_left_alone(tmp_path):
    root = fake_fastdeploy.write(tmp_path, "fastdeploy", version="9.1.0")
    (root / "cache_manager" / "v1").mkdir(parents=True)
    done = python(tmp_path, "\nimport fastdeploy; print('imported')", "1")
    assert done.stdout.strip() == "imported"
    (line,) = done.stderr.splitlines()
    assert "fastdeploy-kvcache-v1 does nothing: its flags, stores, " in line


def test_other_processes_do_not_mind(tmp_path):
    assert python(tmp_path, "\nimport json", "1").returncode == 0


@pytest.mark.parametrize("value", ["2", "true", "yes"])
def test_the_switch_is_0_or_1(monkeypatch, value):
    monkeypatch.setenv(SWITCH, value)
    with pytest.raises(ConfigError, match=f"must be 0 or 1, got '{value}'"):
        plugin.is_enabled()


def test_activating_twice_leaves_one_trigger(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if type(f).__module__ != plugin.__name__])
    monkeypatch.delitem(sys.modules, plugin.FASTDEPLOY, raising=False)  # a fake one of another test, perhaps
    for _ in range(2):
        plugin.activate()
    added = [finder for finder in sys.meta_path if type(finder).__module__ == plugin.__name__]
    assert len(added) == 1
    assert added[0].find_spec("json") is None
