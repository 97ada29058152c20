"""Fixtures for tests of both sides."""

import sys
import tempfile
from types import ModuleType

import pytest


@pytest.fixture
def short_tmp_path():
    """A directory whose name leaves room for that of a unix socket. With a `tmp_path` that is too long, sockets would
    go to /tmp, where all tests that run now would share them."""
    with tempfile.TemporaryDirectory(prefix="kv-") as path:
        yield path


@pytest.fixture
def install(monkeypatch):
    """Puts FAKE modules of FastDeploy, each with its members, where imports find them."""

    def install(modules):
        for name, members in modules.items():
            module = ModuleType(name)
            vars(module).update(members)
            monkeypatch.setitem(sys.modules, name, module)

    return install
