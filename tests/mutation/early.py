"""A pytest plugin: the module that `MUTANT` names is loaded from another file from the start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.mutation.driver import in_process
from tests.mutation.replaced import load_from

_module, _, _changed = os.environ["MUTANT"].partition(":")
load_from(Path(_module), Path(_changed).read_text(encoding="utf-8"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = in_process(items)
