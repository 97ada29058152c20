"""A changed function takes the place of the loaded one."""

from __future__ import annotations

import importlib.util
from importlib.machinery import SourceFileLoader

import pytest

from tests.mutation.mutants import mutants
from tests.mutation.replaced import LoadedFunctions

SOURCE = """
class Base:
    def name(self):
        return "base"

class Child(Base):
    def name(self):
        self.seen = 1
        return super().name()

def outer():
    def inner():
        return 1
    return inner()
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.setattr(SourceFileLoader, "get_code", SourceFileLoader.get_code)
    path = tmp_path / "changed.py"
    path.write_text(SOURCE)
    return load(path)


def load(path):
    spec = importlib.util.spec_from_file_location("changed", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def replace(module, function, was):
    path = module.__spec__.origin
    (mutant,) = (each for each in mutants(SOURCE) if (each.function, each.was) == (function, was))
    LoadedFunctions(module.__file__.rpartition("/")[0]).replace(path, mutant.first, function, mutant.applied_to(SOURCE))


def test_who_holds_the_function_runs_the_change(module):
    held = module.outer
    replace(module, "outer", "1")
    assert held() == 2


def test_a_method_may_lose_its_call_of_super(module):
    child = module.Child()
    replace(module, "Child.name", "return super().name()")
    assert child.name() is None


def test_a_module_that_is_loaded_later_is_the_changed_one(module):
    replace(module, "outer", "1")
    assert load(module.__spec__.origin).outer() == 2
