"""Every row of our tables against the real source, and against the real modules where they can be imported here."""

import os
import shutil

import pytest

from fastdeploy_kvcache_v1.fastdeploy_integration.overlay.bodies import members_lacking
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay.overlay import Overlay
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay.release import fastdeploy_at
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay.table import table_for

from .fastdeploy_trees import ROOT, run_inside, tree

pytestmark = pytest.mark.process

PACKAGE = "fastdeploy_kvcache_v1"

ENGINE_MODULES = ("envs", "config", "engine.args_utils", "engine.resource_manager", "engine.common_engine")

SHOW = """
import fastdeploy
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay import overlay
for row, state in overlay.active().states().items():
    print("ROW", row.target, state.name)
overlay.active().require_complete(overlay.Where.ENGINE)
"""

LATE = """
import fastdeploy, sys
assert "fastdeploy_kvcache_v1.plugin" not in sys.modules
from fastdeploy_kvcache_v1 import plugin
import os
os.environ["ENABLE_V1_KVCACHE_MANAGER"] = "1"
plugin.register()
"""

EVERYTHING = """
import importlib, pathlib, sys
import fastdeploy_kvcache_v1
from fastdeploy.engine.args_utils import EngineArgs
from fastdeploy.utils import FlexibleArgumentParser
from fastdeploy_kvcache_v1 import cli
assert "--write-through-threshold" in EngineArgs.add_cli_args(FlexibleArgumentParser()).format_help()
root = pathlib.Path(fastdeploy_kvcache_v1.__file__).parent
for path in sorted(root.rglob("*.py")):
    importlib.import_module(".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__"))
assert not (root / "lab").exists() and not [name for name in sys.modules if name.startswith(root.name + ".lab")]
cli.main(["doctor", "--source", sys.argv[1]])
print("WITHOUT LAB")
"""

UNTOUCHED = """
import sys
from fastdeploy_kvcache_v1 import plugin
plugin.activate()
import fastdeploy
from fastdeploy import envs
from fastdeploy.config import CacheConfig, FDConfig
from fastdeploy.engine.args_utils import EngineArgs
from fastdeploy.engine import resource_manager
from fastdeploy.engine.sched.resource_manager_v1 import ResourceManagerV1
from fastdeploy.utils import FlexibleArgumentParser
assert resource_manager.PrefixCacheManager.__module__ == "fastdeploy.cache_manager.prefix_cache_manager"
assert "ENABLE_V1_KVCACHE_MANAGER" not in envs.environment_variables
assert not hasattr(CacheConfig, "write_through_threshold") and not hasattr(EngineArgs, "write_through_threshold")
for function in (ResourceManagerV1.schedule, FDConfig.postprocess, CacheConfig.__init__, EngineArgs.__init__):
    assert type(function).__name__ == "function", function
assert "--write-through-threshold" not in EngineArgs.add_cli_args(FlexibleArgumentParser()).format_help()
assert not any(name.startswith("fastdeploy_kvcache_v1.fastdeploy_integration") for name in sys.modules)
print("UNTOUCHED")
"""


def activated(code):
    return f"from fastdeploy_kvcache_v1 import plugin\nplugin.activate()\n{code}"


def test_every_row_fits_the_source(release):
    found = fastdeploy_at(tree(release))
    assert found.release == release
    assert not found.has_own_manager
    assert Overlay(table_for(release), found.root).problems() == {}


@pytest.mark.parametrize("late", [False, True], ids=["before import", "after import"])
def test_engine_rows_are_applied(release, tmp_path, late):
    output = run_inside(release, tmp_path, "-c", LATE + SHOW if late else activated(SHOW), manager=not late)
    states = dict(line.split()[1:] for line in output.splitlines() if line.startswith("ROW"))
    assert set(states) == {row.target for row in table_for(release).rows}
    for target, state in states.items():
        if target.partition(":")[0].removeprefix("fastdeploy.") in ENGINE_MODULES:
            assert state == "APPLIED", target


def test_fastdeploy_starts_and_doctor_runs_where_the_lab_is_deleted(release, tmp_path):
    shutil.copytree(ROOT / PACKAGE, tmp_path / PACKAGE, ignore=shutil.ignore_patterns("lab", "__pycache__"))
    shutil.copytree(ROOT / "patches", tmp_path / "patches")
    output = run_inside(release, tmp_path, "-c", activated(SHOW + EVERYTHING), tree(release), ours=tmp_path)
    assert "WITHOUT LAB" in output
    assert f"patch table: {release}," in output
    assert "Traceback" not in output


def test_plugin_group_alone_is_enough(release, tmp_path, monkeypatch):
    """As FD_PLUGINS does it: in the middle of `import fastdeploy`, with modules half imported."""
    code = """
from unittest import mock
import importlib.metadata
entry = importlib.metadata.EntryPoint("kvcache_v1", "fastdeploy_kvcache_v1.plugin:register", "GROUP")
real = importlib.metadata.entry_points
def entry_points(**chosen):
    found = [each for each in real(**chosen) if each.name != "kvcache_v1"]
    return found + [entry] * (chosen.get("group") == "fastdeploy.tool_parser_plugins")
with mock.patch("importlib.metadata.entry_points", entry_points):
    import fastdeploy
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay import overlay
overlay.active().complete()
"""
    monkeypatch.setenv("FD_PLUGINS", "kvcache_v1")
    output = run_inside(release, tmp_path, "-c", code + SHOW)
    assert "EngineService._wait_for_control_responses APPLIED" in output


def test_without_the_variable_fastdeploy_is_untouched(release, tmp_path):
    assert "UNTOUCHED" in run_inside(release, tmp_path, "-c", UNTOUCHED, manager=False)


def test_a_wrong_release_is_refused_at_import(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTDEPLOY_KVCACHE_HOST_VERSION", "2.6.0")
    output = run_inside("2.5", tmp_path, "-c", activated("import fastdeploy"), expect=1)
    assert output.startswith("fastdeploy-kvcache: error: patch table does not fit: FastDeploy at")
    assert "unset ENABLE_V1_KVCACHE_MANAGER" in output


MANAGER, RUNNER = "engine/sched/resource_manager_v1.py", "worker/gpu_model_runner.py"
CHANGED_BODIES = {
    "the local by which a lost batch is found": (MANAGER, "scheduled_reqs", "batch_reqs"),
    "a number of RequestType": ("engine/request.py", "PREEMPTED = 2", "PREEMPTED = 7"),
    "a third tensor of a layer": (RUNNER, "extend([key_cache, val_cache])", "extend([key_cache, val_cache, None])"),
    "another member of the cache manager": (
        MANAGER,
        "            self.update_metrics()\n",
        "            self.flush()\n",
    ),
    "other tasks": (MANAGER, "return ScheduledPreemptTask(", "return dict("),
    "a match that FastDeploy recycles itself": (
        MANAGER,
        'waiting reschedule...")\n            return False',
        'waiting reschedule...")\n            self._free_blocks(request)\n            return False',
    ),
}
"""What no signature shows: a file, what is there, and what is there instead."""


@pytest.mark.parametrize("change", CHANGED_BODIES)
def test_a_changed_body_is_named(release, change, tmp_path):
    name, old, new = CHANGED_BODIES[change]
    root, table = fastdeploy_at(tree(release)).root, table_for(release)
    assert Overlay(table, root).changed_bodies() == []
    others = tmp_path / "fastdeploy"
    shutil.copytree(root, others, copy_function=os.symlink)
    text = (root / name).read_text(encoding="utf-8")
    assert old in text
    (others / name).unlink()
    (others / name).write_text(text.replace(old, new), encoding="utf-8")
    assert Overlay(table, others).problems() == {}
    assert Overlay(table, others).changed_bodies()


def test_our_cache_manager_has_what_fastdeploys_engine_takes_of_it(release):
    assert members_lacking(fastdeploy_at(tree(release)).root) == []
