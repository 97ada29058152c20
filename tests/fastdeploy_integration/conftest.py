"""Fixtures for tests of both sides."""

import tempfile

import pytest


@pytest.fixture
def short_tmp_path():
    """A directory whose name leaves room for that of a unix socket. With a `tmp_path` that is too long, sockets would
    go to /tmp, where all tests that run now would share them."""
    with tempfile.TemporaryDirectory(prefix="kv-") as path:
        yield path
