"""FastDeploy's configuration and classes start processes of their own."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items):
    for item in items:  # of the whole run
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.process)
