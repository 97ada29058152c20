"""FastDeploy's configuration and classes start processes of their own."""

import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.process)
