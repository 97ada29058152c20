"""Which modules may import which, and what importing a half loads."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "fastdeploy_kvcache_v1"

FOUNDATION = {"metadata", "config", "errors", "batch_request"}
SCHEDULER = {
    "block_pool",
    "run",
    "run_queue",
    "invariants",
    "event_log",
    "cache_stats",
    "residency",
    "radix_tree",
    "tiering",
    "told_copies",
    "cache_utils",
    "request_state",
    "open_step",
    "request_table",
    "lent_slots",
    "cache_manager",
}
WORKER = {
    "ops",
    "attention",
    "runtime",
    "host_pool",
    "hazards",
    "layer_done_counter",
    "transfer_manager",
    "cache_controller",
}
TOOLS = {"replay", "bench_serve"}
LEAVES = {"embedded", "fastdeploy_host"}
BORROWS_THE_MODEL = PACKAGE / "fastdeploy_host" / "cpu_worker"
TOP = {"cli", "doctor", "plugin"}

# Layer -> layers it may import from, besides itself.
MAY_IMPORT = {
    "foundation": set(),
    "scheduler": {"foundation"},
    "worker": {"foundation"},
    "tools": {"foundation", "scheduler"},
    "leaves": {"foundation", "scheduler", "worker"},
    "top": {"foundation", "scheduler", "worker", "tools", "leaves"},
}
LAYERS = {
    "foundation": FOUNDATION,
    "scheduler": SCHEDULER,
    "worker": WORKER,
    "tools": TOOLS,
    "leaves": LEAVES,
    "top": TOP,
}
LAYER_OF = {component: layer for layer, components in LAYERS.items() for component in components}

FORBIDDEN_IN_SCHEDULER = {"paddle", "cupy", "fastdeploy"}


def component_of(path: Path) -> str:
    """Top-level module or sub-package a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_components(path: Path) -> set[str]:
    """Components of this package that a file imports, wherever in the file."""
    package = ["fastdeploy_kvcache_v1", *path.relative_to(PACKAGE).parts[:-1]]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = [*base, *(node.module.split(".") if node.module else [])]
            names = [[*module, alias.name] for alias in node.names]
        else:
            continue
        found |= {name[1] for name in names if name[0] == "fastdeploy_kvcache_v1" and len(name) > 1}
    return {name for name in found if not name.startswith("__")}


def sources() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path):
    component = component_of(path)
    assert component in LAYER_OF, f"{component} is new: give it a layer in this test"
    layer = LAYER_OF[component]
    for imported in imported_components(path) - {component}:
        assert imported in LAYER_OF, f"{path.name} imports {imported}, which has no layer in this test"
        target = LAYER_OF[imported]
        if layer == "leaves" and not (BORROWS_THE_MODEL in path.parents and imported == "embedded"):
            assert target != "leaves", f"{component} imports {imported}: leaves do not know each other"
        assert target == layer or target in MAY_IMPORT[layer], f"{layer} {component} imports {target} {imported}"


def test_no_import_cycles_between_components():
    imports = {}
    for path in sources():
        imports.setdefault(component_of(path), set()).update(imported_components(path) - {component_of(path)})
    done, path = set(), []

    def visit(component):
        assert component not in path, f"import cycle: {' -> '.join([*path, component])}"
        if component in done:
            return
        path.append(component)
        for imported in imports.get(component, ()):
            visit(imported)
        path.pop()
        done.add(component)

    for component in imports:
        visit(component)


def modules_after(statement: str) -> set[str]:
    """Names of all modules a fresh interpreter has loaded after `statement`."""
    code = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent, timeout=60
    )
    return set(json.loads(done.stdout))


def existing(components: set[str]) -> list[str]:
    return sorted(name for name in components if (PACKAGE / f"{name}.py").exists() or (PACKAGE / name).is_dir())


def test_scheduler_half_loads_no_paddle_cupy_or_fastdeploy():
    names = ", ".join(existing(FOUNDATION | SCHEDULER))
    loaded = modules_after(f"from fastdeploy_kvcache_v1 import {names}")
    assert {name.split(".")[0] for name in loaded} & FORBIDDEN_IN_SCHEDULER == set()
    ours = {name.split(".")[1] for name in loaded if name.startswith("fastdeploy_kvcache_v1.")}
    assert ours <= FOUNDATION | SCHEDULER


def test_the_package_itself_loads_nothing():
    before = modules_after("")
    assert modules_after("import fastdeploy_kvcache_v1") - before == {"fastdeploy_kvcache_v1"}


def test_command_line_help_loads_no_paddle():
    if not (PACKAGE / "cli.py").exists():
        pytest.skip("no command line yet")
    loaded = modules_after("import fastdeploy_kvcache_v1.cli")
    assert {name.split(".")[0] for name in loaded} & FORBIDDEN_IN_SCHEDULER == set()
