"""The stand-in SDK can be imported, and keeps what it stores in the test's directory."""

import pytest

from tests.storage.attention_store.stand_in import installed


@pytest.fixture
def store(tmp_path, monkeypatch):
    """The directory."""
    with installed(monkeypatch, tmp_path / "store") as directory:
        yield directory
