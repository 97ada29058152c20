"""Which folders may import which, and what importing a half loads."""

import ast
import json
import subprocess
import sys
from graphlib import TopologicalSorter

import pytest

from fastdeploy_kvcache_v1.contract.installation import DEPENDENCIES

from .house import LAB, PACKAGE, PICTURE, drawn, imported_files, imported_places, place_of, rooms, sources

TOP = {"cli", "doctor", "plugin"}
"""Modules beside the folders that may import everything, and that nobody imports."""
SHARED = {path.stem for path in PACKAGE.glob("*.py")} - {*TOP, "__init__"}
"""All others beside the folders: everybody may import them, and they import only each other."""

EVERYBODY = {"contract", "telemetry"}
"""Folders that every folder may import from."""

MAY_IMPORT = {
    "telemetry": set(),
    "contract": {"telemetry"},
    "scheduler": EVERYBODY,
    "attention": EVERYBODY,
    "link": EVERYBODY,
    "worker": {"attention", *EVERYBODY},
    "storage": {"attention", "link", "scheduler", *EVERYBODY},
    "transfer": {"attention", "worker", *EVERYBODY},
    "sizing": {"scheduler", *EVERYBODY},
    "explain": EVERYBODY,
    "page": {"explain", *EVERYBODY},
    "fastdeploy_integration": {
        "link",
        "scheduler",
        "sizing",
        "attention",
        "worker",
        "storage",
        "transfer",
        "page",
        *EVERYBODY,
    },
    "lab": {
        "link",
        "scheduler",
        "sizing",
        "attention",
        "worker",
        "storage",
        "transfer",
        "page",
        "fastdeploy_integration",
        *EVERYBODY,
    },
}
"""Folder -> folders it may import from, besides itself and the shared modules. Production imports nothing of `lab`."""

INSIDE = {
    "worker/ops": set(),
    "worker/runtime": {"worker/ops"},
    "worker/cuda": {"worker/ops", "worker/runtime"},
    "storage/engine": {"attention", "link", "scheduler"},
    "storage/file": {"attention"},
    "storage/attention_store": {"attention", "scheduler", "storage/engine"},
    "storage/mooncake": set(),
    "fastdeploy_integration/overlay": set(),
    "fastdeploy_integration/engine": {
        "link",
        "scheduler",
        "sizing",
        "storage",
        "page",
        "fastdeploy_integration/overlay",
    },
    "fastdeploy_integration/disaggregation": {
        "link",
        "storage",
        "transfer",
        "worker",
        "fastdeploy_integration/engine",
        "fastdeploy_integration/overlay",
    },
    "fastdeploy_integration/worker": {"attention", "link", "worker", "storage", "fastdeploy_integration/overlay"},
    "lab/model": {"attention", "worker"},
    "lab/hub": {"worker"},
    "lab/replay": {"scheduler"},
    "lab/server/engine": {
        "link",
        "scheduler",
        "storage",
        "transfer",
        "lab/model",
        "lab/server",
    },
    "lab/server/worker": {"attention", "link", "worker", "storage", "transfer", "lab/model", "lab/server"},
    "lab/server": {"attention", "scheduler", "sizing", "worker", "storage", "transfer", "page", "lab/model", "lab/hub"},
    "lab/router": {"transfer", "lab/server"},
    "lab/demo": {"page", "lab/server"},
    "lab/fastdeploy_cpu": {"attention", "link", "worker", "fastdeploy_integration", "lab/model"},
}
"""Folders inside a folder with stricter rules: these, themselves, the folders for everybody, and plain modules of the
folder around them."""

FORBIDDEN_IN_SCHEDULER = {"paddle", "cupy", "fastdeploy"}


def within(place: str, folders: set[str]) -> bool:
    return any(place == folder or place.startswith(folder + "/") for folder in folders)


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_follow_the_rules(path):
    place = place_of(path)
    folder = place.split("/")[0]
    if folder in TOP:
        return
    imported = imported_places(path) - SHARED
    if folder in SHARED:
        assert not imported, f"{path.name} is shared by all: it imports only its like"
        return
    assert folder in MAY_IMPORT, f"{folder} is new: give it a rule in this test"
    for other in imported:
        allowed = within(other, {folder, *MAY_IMPORT[folder]})
        assert allowed, f"{place} must not import {other}"
    strict = next((inner for inner in INSIDE if within(place, {inner})), None)
    if strict is not None:
        around = strict.split("/")[0]
        for other in imported - {around}:
            assert within(other, {strict, *INSIDE[strict], *EVERYBODY}), f"{place} must not import {other}"


def test_command_line_knows_every_foreign_module_that_the_package_imports():
    """A missing one is a line with the extra that installs it, where a name that nobody knows is a bug."""
    nodes = [node for path in sources() for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    found = {name.split(".")[0] for name in names} - {*sys.stdlib_module_names, "tomllib", "fastdeploy"}
    assert found == DEPENDENCIES


def test_every_rule_names_a_folder():
    named = set(MAY_IMPORT).union(INSIDE, *MAY_IMPORT.values(), *INSIDE.values())
    assert [folder for folder in sorted(named) if not (PACKAGE / folder).is_dir()] == []
    assert [name for name in sorted(TOP) if not (PACKAGE / f"{name}.py").is_file()] == []


def test_neither_the_rules_nor_the_files_have_a_circle():
    TopologicalSorter(MAY_IMPORT).prepare()
    TopologicalSorter({path: imported_files(path) for path in sources()}).prepare()


def test_production_imports_nothing_of_the_lab():
    assert [room for room, others in rooms().items() if LAB in others] == []
    loose = [path for path in PACKAGE.glob("*.py") if any(place.startswith(LAB) for place in imported_places(path))]
    assert loose == []


def test_the_picture_of_the_rooms_is_todays():
    assert PICTURE.read_text(encoding="utf-8") == drawn(), "draw it again: ./scripts/docs-tables"


def modules_after(statement: str) -> set[str]:
    """Names of all modules a fresh interpreter has loaded after `statement`."""
    code = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent, timeout=60
    )
    return set(json.loads(done.stdout))


@pytest.mark.process
def test_scheduler_half_loads_no_paddle_cupy_or_fastdeploy():
    modules = [path for path in (PACKAGE / "scheduler").rglob("*.py") if path.name != "__init__.py"]
    names = [".".join((PACKAGE.name, *path.relative_to(PACKAGE).with_suffix("").parts)) for path in modules]
    loaded = modules_after(f"import {', '.join(names)}")
    assert {name.split(".")[0] for name in loaded} & FORBIDDEN_IN_SCHEDULER == set()
    ours = {name.split(".")[1] for name in loaded if name.startswith(f"{PACKAGE.name}.")}
    assert ours <= {*SHARED, *EVERYBODY, "scheduler"}


@pytest.mark.process
def test_the_package_itself_loads_nothing():
    before = modules_after("")
    assert modules_after("import fastdeploy_kvcache_v1") - before == {"fastdeploy_kvcache_v1"}


@pytest.mark.process
@pytest.mark.parametrize("modules", ["cli", "worker.cache_controller, fastdeploy_kvcache_v1.attention.layouts"])
def test_the_command_line_and_the_worker_half_load_no_paddle(modules):
    loaded = modules_after(f"import fastdeploy_kvcache_v1.{modules}")
    assert {name.split(".")[0] for name in loaded} & FORBIDDEN_IN_SCHEDULER == set()
