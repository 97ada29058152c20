"""Settings for the whole suite. Fixtures live beside the tests that use them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import settings

import tests.night
from fastdeploy_kvcache_v1.lab.model import configure_reproducible_math

from .processes import Guard

# Times differ between machines, so tests never assert them. The same examples every time; new ones belong to the night.
settings.register_profile("suite", deadline=None, print_blob=True, derandomize=True)
settings.register_profile("night", parent=settings.get_profile("suite"), derandomize=False, database=None)
settings.load_profile("suite")

# The math library must be set up before any test module imports paddle.
configure_reproducible_math()

LEFT_OUT = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--idle-marks", action="store_true", help="fail where a module has the mark `process` for nothing")

    parser.addoption("--new-seeds", type=int, metavar="N", help="random tests alone, with other seeds: scripts/night")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.new_seeds:
        settings.load_profile("night")
        tests.night.is_night = True
    config.pluginmanager.register(Guard(), "guard")


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that is parametrized by `seed` gets others."""
    shift = 1000 * (metafunc.config.option.new_seeds or 0)
    marks = metafunc.definition.own_markers
    for place, mark in enumerate(marks):
        if shift and mark.name == "parametrize" and mark.args[0] == "seed":
            marks[place] = pytest.mark.parametrize("seed", [seed + shift for seed in mark.args[1]]).mark


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.new_seeds:
        items[:] = [item for item in items if is_random(item)]
    unfit = [
        item.nodeid for item in items if item.get_closest_marker("smoke") and not item.get_closest_marker("process")
    ]
    if unfit:
        raise pytest.UsageError(f"`smoke` is for tests that have the mark `process`: {', '.join(unfit)}")


def is_random(item: pytest.Item) -> bool:
    is_seeded = "seed" in getattr(getattr(item, "callspec", None), "params", ())
    return is_seeded or getattr(getattr(item, "obj", None), "is_hypothesis_test", False)


def pytest_deselected(items: list[pytest.Item]) -> None:
    config = items[0].config
    config.stash[LEFT_OUT] = config.stash.get(LEFT_OUT, 0) + len(items)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Every process of pytest-xdist has left out the same tests."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many tests were skipped or left out, and why. A reason ends with the command that gets what is missing."""
    skipped = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", [])
        if isinstance(report.longrepr, tuple)
    )
    for reason, count in sorted(skipped.items()):
        terminalreporter.write_line(f"skipped {count}: {reason}")
    config = terminalreporter.config
    if config.option.markexpr and (left_out := config.stash.get(LEFT_OUT, 0)):
        chosen = config.option.markexpr
        terminalreporter.write_line(f'left out {left_out}, not in "{chosen}": ./scripts/test --all runs every test')
    if seed := config.option.new_seeds:
        for report in terminalreporter.stats.get("failed", []):
            terminalreporter.write_line(f"replay: ./scripts/night {seed} '{report.nodeid}'")
