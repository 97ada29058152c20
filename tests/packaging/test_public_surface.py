"""docs/develop/api-stability.md promises modules; `__all__` says what of them."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/develop/api-stability.md").read_text()
PUBLIC = re.findall(r"^\| `(fastdeploy_kvcache_v1\.[a-z_.]+)` \|", PAGE, re.M)


def test_the_page_names_the_front_doors():
    assert {"fastdeploy_kvcache_v1.scheduler.cache_manager", "fastdeploy_kvcache_v1.config"} <= set(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_public_module_lists_its_definitions_in_all(name):
    module = importlib.import_module(name)
    defined = {
        key
        for key, value in vars(module).items()
        if key[0] != "_" and (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__ == name
    }
    assert defined <= set(module.__all__)
    assert [key for key in module.__all__ if not hasattr(module, key)] == []


@pytest.mark.parametrize("name", PUBLIC)
def test_public_definition_has_a_docstring(name):
    module = importlib.import_module(name)
    values = [getattr(module, key) for key in module.__all__]
    bare = [
        value.__qualname__
        for value in values
        if (inspect.isclass(value) or inspect.isfunction(value)) and not (value.__doc__ or "").strip()
    ]
    assert bare == []
