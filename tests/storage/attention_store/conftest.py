"""The stand-in SDK can be imported, and keeps what it stores in the test's directory."""

import sys

import pytest

from tests.storage.attention_store.stand_in import SDK


@pytest.fixture
def store(tmp_path, monkeypatch):
    """The directory."""
    directory = tmp_path / "store"
    directory.mkdir()
    monkeypatch.setenv("STAND_IN_STORE", str(directory))
    monkeypatch.syspath_prepend(str(SDK))
    yield directory
    for name in [name for name in sys.modules if name.startswith("attentionstore_sdk")]:
        del sys.modules[name]
