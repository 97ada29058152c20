"""Mocks in place of packages that an engine imports and a CPU run never calls."""

from __future__ import annotations

import importlib.abc
import sys
from importlib.machinery import ModuleSpec
from typing import Any
from unittest.mock import MagicMock


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages of `names`, and all modules below them."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] in self._names else None

    def create_module(self, spec: ModuleSpec) -> Any:
        return MagicMock(name=spec.name)

    def exec_module(self, module: Any) -> None:
        """A mock has everything."""


def install(*names: str) -> None:
    sys.meta_path.append(Finder(*names))
