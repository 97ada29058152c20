"""Mutation testing of the scheduler half: changes its modules one place at a time and runs its tests on each change.

`scripts/mutate [MODULE ...]`; a module is a file name without `.py`. Prints a line per survivor, a change that no test
noticed, then a table. Each is a missing test, an equal program, or a matter of speed: docs/mutation.md judges them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import hypothesis  # noqa: F401  loaded once here, not in each child
import numpy  # noqa: F401
import pytest
from mutants import mutants

ROOT = Path(__file__).resolve().parents[2]
SCHEDULER = "fastdeploy_kvcache_v1/scheduler"
TREE = ("fastdeploy_kvcache_v1", "tests", "pyproject.toml")
TEST_SECONDS, RUN_SECONDS = 120, 1200
"""How long one test may take, and all of them: a change that loops is noticed, too."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/mutate", description="Mutation testing of the scheduler half.")
    parser.add_argument("modules", nargs="*", metavar="MODULE", help="file names without .py (default: all)")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="try only every N-th change of a module")
    arguments = parser.parse_args()
    known = {path.stem: path for path in sorted((ROOT / SCHEDULER).rglob("*.py")) if path.stem != "__init__"}
    for name in arguments.modules:
        if name not in known:
            parser.error(f"{SCHEDULER} has no module {name}: choose among {', '.join(known)}")
    results = {}
    with tempfile.TemporaryDirectory() as directory:
        tree = copy_of_the_tree(Path(directory))
        if not survives(tree, tests_for("")):
            raise SystemExit("error: the tests of the scheduler half fail without any change: run scripts/test first")
        for name in arguments.modules or known:
            results[name] = try_module(tree, known[name].relative_to(ROOT), arguments.every)
    print("\n| module | changes | survivors |\n|---|---|---|")
    for name, (tried, survivors) in results.items():
        print(f"| `{name}` | {tried} | {survivors} |")
    return 0


def copy_of_the_tree(directory: Path) -> Path:
    for part in TREE:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, directory / part, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(source, directory / part)
    return directory


def tests_for(module: str) -> list[str]:
    """All tests of the scheduler half, those of the module first: they end most mutants soonest."""
    tests = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests/scheduler").rglob("test_*.py"))
    return sorted(tests, key=lambda test: (Path(test).stem != f"test_{module}", "machine" in test or "random" in test))


def try_module(tree: Path, module: Path, every: int) -> tuple[int, int]:
    """How many changes were tried, and how many survived; prints these."""
    path = tree / module
    original = path.read_text(encoding="utf-8")
    tried = list(mutants(original))[::every]
    survivors = 0
    for mutant in tried:
        path.write_text(mutant.source, encoding="utf-8")
        if survives(tree, tests_for(module.stem)):
            survivors += 1
            line = original.splitlines()[mutant.line - 1].strip()
            was, now = (" ".join(text.split()) for text in (mutant.was, mutant.now))
            print(f"{module}:{mutant.line}: `{was}` -> `{now}` in `{line}`", flush=True)
    path.write_text(original, encoding="utf-8")
    return len(tried), survivors


def survives(tree: Path, tests: Sequence[str]) -> bool:
    """Whether all tests pass. A child of this process runs them, which has loaded pytest, NumPy and Hypothesis."""
    child = multiprocessing.get_context("fork").Process(target=run_tests, args=(tree, tests))
    child.start()
    child.join(RUN_SECONDS)
    child.kill()
    child.join()
    return child.exitcode == 0


def run_tests(tree: Path, tests: Sequence[str]) -> None:
    os.chdir(tree)
    sys.path[:] = [str(tree), *(entry for entry in sys.path if Path(entry).resolve() != ROOT)]
    sys.dont_write_bytecode = True
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    options = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", f"--timeout={TEST_SECONDS}"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # Hypothesis was loaded before pytest saw it
    os._exit(int(pytest.main([*options, *tests]) != pytest.ExitCode.OK))


if __name__ == "__main__":
    sys.exit(main())
