"""Empty modules in place of packages that an engine imports and a CPU run never calls."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any


class Empty(type):
    """A class whose attributes are itself; called as a decorator, it returns what it decorates."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __call__(cls, *given: Any, **_: Any) -> Any:
        return given[0] if len(given) == 1 and callable(given[0]) else cls


class Nothing(metaclass=Empty):
    pass


class EmptyModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages of `names`, and all below them."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = set(names)

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] in self._names:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return EmptyModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install(*names: str) -> None:
    sys.meta_path.append(Finder(names))
