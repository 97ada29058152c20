"""Settings for the whole suite. Fixtures live beside the tests that use them."""

from __future__ import annotations

import os
from collections import Counter

import pytest
from hypothesis import settings

from fastdeploy_kvcache_v1.model import configure_reproducible_math

# Times differ between machines, so tests never assert them; CI tries the same examples every time.
settings.register_profile("suite", deadline=None, print_blob=True)
settings.register_profile("ci", parent=settings.get_profile("suite"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "suite")

# The math library must be set up before any test module imports paddle.
configure_reproducible_math()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many tests were skipped, and why. A reason ends with the command that gets what is missing."""
    skipped = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", [])
        if isinstance(report.longrepr, tuple)
    )
    for reason, count in sorted(skipped.items()):
        terminalreporter.write_line(f"skipped {count}: {reason}")
