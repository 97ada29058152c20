"""Without FastDeploy these tests are skipped; one line of the summary says how to run them."""

import os

from .host_trees import COMMAND, VARIABLES


def pytest_terminal_summary(terminalreporter):
    missing = [f"FastDeploy {release}" for release, variable in VARIABLES.items() if not os.environ.get(variable)]
    if missing:
        terminalreporter.write_line(f"tests with {' and '.join(missing)} were skipped; to run them: {COMMAND}")
